"""`tandem chat`: a conversation in the terminal."""
