"""Tool calls: one call against a reference, or conversations with tools and users."""
