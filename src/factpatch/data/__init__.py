"""From raw facts to revisions."""
