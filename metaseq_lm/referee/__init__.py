"""The referee: checks that recorded results are what their plan says, and that they come out."""
