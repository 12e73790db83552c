"""Named, guarded run-time mends of upstream packages; each says why, and for which versions."""
