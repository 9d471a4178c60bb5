"""HTTP routes of the API worker."""
