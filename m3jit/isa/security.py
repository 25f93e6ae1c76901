"""Keys, authentication and encryption (0x66, 0xD8-0xDF), compression (0xF0-0xF3)."""
from m3jit.isa.fields import R1, R2, R3, R4, I64, U8, U16, U32, U64, Enum, Rd, RegList
from m3jit.isa.table import STATELESS, StateDoc, op

KEYS = StateDoc("the key store (region 0x15): keys, nonces and replay windows, outside the context root",
                "not captured",
                "not rolled back: a nonce must never be used twice")
_SOURCE = {"hmac": "RFC 2104, FIPS 180-4", "agree": "RFC 7748, Noise protocol framework", "hkdf": "RFC 5869",
           "sign": "RFC 8032", "aead": "RFC 8439", "window": "RFC 4303 section 3.4.3"}


@op(0x66, "HMAC", route="absent", shape="[32]", dtypes="any in, U8 out", state=STATELESS, source=_SOURCE["hmac"])
def hmac(m, rd: Rd, key: R1("tensor", "state"), message: R2, truncate: U8[0] = 32):
    """rd = the first TRUNCATE bytes of HMAC-SHA256(key, bytes of message).  Errors: TRUNCATE 0 or over 32."""


@op(0xD8, "KEY_AGREE", route="absent", state=KEYS, source=_SOURCE["agree"])
def key_agree(m, key: Rd("state"), peers: RegList(count=8)[0] = (),
              protocol: Enum("NOISE_XX NOISE_IK X25519")[9] = "NOISE_XX",
              timeout: I64[10] = -1):
    """key = a fresh session key shared with PEERS.  Errors: a peer that does not prove its identity; TIMEOUT ns passed.

    The key never leaves the key store; the register holds a handle."""


@op(0xD9, "KEY_ROTATE", route="absent", state=KEYS, source=_SOURCE["agree"])
def key_rotate(m, key: R1("state", both=True), interval: U64[0] = 0):
    """Replace the key by the next one of its chain, now (INTERVAL=0) or every INTERVAL ns; the old one opens messages
    for one more interval."""


@op(0xDA, "KEY_DERIVE", route="absent", state=KEYS, source=_SOURCE["hkdf"])
def key_derive(m, rd: Rd("state"), key: R1("state", "tensor"), info: R2 = None, salt: R3 = None, len: U16[0] = 32):
    """rd = HKDF-SHA256(key, salt, info) of LEN bytes, in the key store.  Errors: LEN 0 or over 8160."""


@op(0xDB, "REPLAY_CHECK", route="absent", state=KEYS, source=_SOURCE["window"])
def replay_check(m, rd: Rd("int"), key: R1("state"), counter: R2("int"), window: U16[0] = 64):
    """rd = 1 if the counter is new within the last WINDOW ones of this key (and is now seen), else 0."""


@op(0xDC, "CRYPTO_SIGN", route="absent", shape="[64]", dtypes="U8", state=KEYS, source=_SOURCE["sign"])
def crypto_sign(m, rd: Rd, message: R1, key: R2("state"), algorithm: Enum("ED25519 HMAC_SHA256")[0] = "ED25519"):
    """rd = signature (ED25519: 64 bytes) or authentication code (32 bytes) of the message's bytes."""


@op(0xDD, "CRYPTO_VERIFY", route="absent", state=KEYS, source=_SOURCE["sign"])
def crypto_verify(m, rd: Rd("int"), mac: R1, key: R2("state"), message: R3 = None,
                  algorithm: Enum("ED25519 HMAC_SHA256")[0] = "ED25519"):
    """rd = 1 if the signature or code is right, else 0, in time that does not depend on where it differs.

    Without a message: the last received one."""


@op(0xDE, "CRYPTO_ENCRYPT", route="absent", shape="[n + 16]", dtypes="U8", state=KEYS, source=_SOURCE["aead"])
def crypto_encrypt(m, rd: Rd, message: R1, key: R2("state"), associated: R3 = None,
                   nonce: R4("tensor", dest=True) = None):
    """rd = ChaCha20-Poly1305 of the message's bytes, its tag behind them; nonce = the 12 bytes used (a counter of the
    key).

    Errors: the key's counter is used up."""


@op(0xDF, "CRYPTO_DECRYPT", route="absent", shape="[n - 16]", dtypes="U8", state=KEYS, source=_SOURCE["aead"])
def crypto_decrypt(m, rd: Rd, message: R1, key: R2("state"), nonce: R3, associated: R4 = None):
    """rd = the bytes CRYPTO_ENCRYPT sealed.  Traps: a tag that does not match; nothing is written then."""


ALGORITHMS = "LZ4 ZSTD RLE_ZERO"


@op(0xF0, "COMPRESS", route="absent", shape="[bytes]", dtypes="any in, U8 out", state=STATELESS,
    source="LZ4 frame format, RFC 8878 (Zstandard)")
def compress(m, rd: Rd, x: R1, algorithm: Enum(ALGORITHMS)[0] = "ZSTD", level: U8[1] = 3):
    """rd = the tensor's dtype, shape and compressed bytes; the same input gives the same bytes."""


@op(0xF1, "DECOMPRESS", route="absent", dtypes="U8 in, any out", state=STATELESS, source="as COMPRESS")
def decompress(m, rd: Rd, x: R1, limit: U64[0] = 1 << 32):
    """rd = the tensor COMPRESS was given.  Errors: damaged bytes; a result over LIMIT bytes."""


@op(0xF2, "COMPRESS_QUERY", route="absent", shape="[3]", dtypes="F32", state=STATELESS, source="sampling")
def compress_query(m, rd: Rd, x: R1, sample: U32[0] = 65536):
    """rd = estimated ratio of LZ4, ZSTD and RLE_ZERO from SAMPLE bytes spread over the tensor."""


@op(0xF3, "ENTROPY_ESTIMATE", route="absent", dtypes="any", state=STATELESS, source="Shannon entropy")
def entropy_estimate(m, rd: Rd("float"), x: R1, order: U8[0] = 0):
    """rd = bits per byte: -sum p log2 p over byte values (ORDER=1: given the byte before).  An empty tensor gives 0."""
