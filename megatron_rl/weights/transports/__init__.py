"""How the bytes of a weight version travel from the trainer to the generators: one file each."""
