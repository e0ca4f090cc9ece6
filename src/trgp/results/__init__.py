"""What runs leave behind: the accuracy matrix and what is read off it."""
