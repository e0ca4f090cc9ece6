"""The algorithm itself, piece by piece: needs torch alone and imports nothing else of trgp."""
