"""The choice of the extension that suits a model and texts, by measuring and not by a formula."""
