"""What was measured, in tables, figures, sentences and pages; nothing is measured here."""
