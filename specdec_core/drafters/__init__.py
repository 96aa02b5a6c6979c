"""What proposes drafts."""
