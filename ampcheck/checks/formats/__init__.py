"""What narrow formats would lose."""
