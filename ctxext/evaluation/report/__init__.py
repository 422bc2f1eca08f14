"""Tables, figures, sentences and pages of measurements; nothing is measured here."""
