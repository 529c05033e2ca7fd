"""The HTTP service and its page: ask a model, try a correction, and keep accepted facts in a ledger."""
