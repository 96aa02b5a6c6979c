"""What a target remembers between passes."""
