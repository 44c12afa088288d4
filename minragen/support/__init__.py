"""What the reading list leans on, and nobody needs to read first."""
