"""Reading, paraphrasing and splitting facts, and making revisions from them."""
