"""HTTP routes: what the API worker serves."""
