"""Operations of a decoder's step in C, compiled at first use; without a compiler nothing of it is used."""
