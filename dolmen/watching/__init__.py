"""What a run has left behind, as a page to look at: a room that imports no torch."""
