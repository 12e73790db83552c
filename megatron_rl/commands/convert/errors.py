"""What a conversion refuses."""


class ConvertError(ValueError):
    """A checkpoint that cannot be converted; names the file or tensor, and the remedy."""
