"""What every page that we write looks like."""
