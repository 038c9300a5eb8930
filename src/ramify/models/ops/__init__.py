"""Operations of a decoder, by device."""
