"""Models that can score drafts."""
