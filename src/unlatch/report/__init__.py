"""Tables, figures and pages from what runs wrote down; where they ran does not matter here."""
