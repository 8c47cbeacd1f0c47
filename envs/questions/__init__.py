"""Questions with one right answer that is compared as text or by a library."""
