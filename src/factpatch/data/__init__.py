"""Data: reading facts, paraphrasing, splitting, and making revisions from them."""
