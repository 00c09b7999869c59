"""Text to tokens and back: single bytes, plus whole pieces for common words, plus one end token.

The vocabulary is fixed in this file, so the same text always gives the same tokens.
"""

import codecs

from chat.debug_log import logged

_WORDS = """
the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which
one you were her all she there would their we him been has when who will more no if out so said what up its about
into than them can only other new some could time these two may then do first any my now such like our over man me
even most made after also did many before must through back years where much your way well down should because each
just those people how too little state good very make world still own see men work long here get both between life
being under never day same another know while last might us great old year off come since against go came right used
take three model request answer question token layer server page data memory device host copy batch cache
service system number point part place small high large next early hand eye week case group problem fact word idea
water room line side kind head house mother area money story night home power hour game end name body door face
others level office person art war history party result change morning reason research girl guy moment air teacher
river road book letter green white black red blue north south east west spring summer winter bridge garden window tree
force education foot boy age policy music mind voice light sound paper table
"""
_PIECES = [bytes([value]) for value in range(256)] + [f" {word}".encode() for word in _WORDS.split()]
_IDS = {piece: token for token, piece in enumerate(_PIECES)}
_LONGEST = max(len(piece) for piece in _PIECES)

END = len(_PIECES)
VOCABULARY = len(_PIECES) + 1


def encode(text: str) -> list[int]:
    """Tokens of a text: at every place the longest piece that fits. A lone surrogate raises UnicodeEncodeError."""
    data = text.encode()
    tokens = []
    at = 0
    while at < len(data):
        piece = _longest_piece(data, at)
        tokens.append(_IDS[piece])
        at += len(piece)
    return tokens


@logged("decode_text")
def decode(tokens: list[int]) -> str:
    """Text of a list of tokens; bytes that are not UTF-8 come out as U+FFFD, the end token as nothing."""
    return b"".join(_PIECES[token] for token in tokens if token != END).decode(errors="replace")


@logged("decode_text")
def decode_next(pending: bytes, token: int) -> tuple[str, bytes]:
    """Text that is complete once `token` has arrived, and the bytes of a character that is still open."""
    data = pending if token == END else pending + _PIECES[token]
    text, used = codecs.utf_8_decode(data, "replace", token == END)
    return text, data[used:]


def _longest_piece(data: bytes, at: int) -> bytes:
    for length in range(_LONGEST, 1, -1):
        piece = data[at : at + length]
        if piece in _IDS:
            return piece
    return data[at : at + 1]
