"""State-space scans (0x13, 0x14) and audio (0x15-0x17, 0x44-0x49)."""
from m3jit.isa.fields import F32, STATE, R, R1, R2, R3, R4, U8, U16, U32, Enum, IntOrReg, PayloadFlag, Rd
from m3jit.isa.table import STATELESS, StateDoc, op
from m3jit.isa.transformer import CELL_STATE
from m3jit.isa.types import F32 as F32_TYPE

CODEC_STATE = StateDoc("a codec window of the context root (the samples or frames the next call still needs)",
                       "O(1): the value is immutable and shared", "the window of the snapshot is put back")
DEPTH_STATE = StateDoc("keys and values of (stream, layer) in a KV stream of the context root",
                       "O(1): pages are append-only and shared",
                       "the stream's length and pages of the snapshot are put back")
FLOAT = "F32 F16 BF16"


@op(0x13, "SSM_SCAN", shape="that of x [T, channels]", dtypes=FLOAT, state=CELL_STATE,
    source="selective state-space recurrence: Gu and Dao 2023 (Mamba), Dao and Gu 2024 (Mamba-2)")
def ssm_scan(xp, rd: Rd, x: R1, h: R2("state", both=True, banks=(STATE,)), dt: R3, a: R4, b: R[0], c: R[1],
             d: R[2] = None, dt_bias: R[3] = None, softplus: PayloadFlag(0)[4] = False, layer: U16[6] = 0,
             heads: U16[8] = 0, groups: U16[10] = 1):
    """h = h * exp(dt A) + (dt x) B;  y = C h + D x, for each row of x in order.

    HEADS 0: dt [T, channels] and A [channels, d_state].  HEADS given: channels = HEADS * size in order, dt [T, HEADS]
    and A [HEADS] are shared by the channels of a head.  A is negative.  B and C [T, GROUPS * d_state]: a group serves
    channels / GROUPS neighbouring channels.  D [channels] (or [HEADS]) or absent.  dt has DT_BIAS added, then SOFTPLUS
    makes it log(1 + e^dt).  h [channels, d_state] of LAYER lives in the state; before its first use it is 0.  T = 0
    leaves it as it is.
    Order of operations, in f32: u = dt x; h = fma(h, exp(dt A), u B); y folds fma(h, C, y) over d_state from +0; then
    fma(D, x, y).  Rows are done one after the other: a prompt in pieces gives the bytes of the whole.
    Traps: shapes that do not fit, a layer whose h has another shape, a handle that is no recurrent state."""
    if len(x.shape) != 2:
        raise xp.error(f"SSM_SCAN needs rows x [T, channels], got {len(x.shape)} dimensions")
    rows, cast = x, xp.cast
    x, dt, a, b, c = (cast(v, F32_TYPE) for v in (x, dt, a, b, c))
    d = None if d is None else cast(d, F32_TYPE)
    if dt_bias is not None:
        dt = xp.add(dt, xp.reshape(cast(dt_bias, F32_TYPE), (heads or x.shape[1],)))
    if softplus:
        dt = xp.softplus(dt)
    if heads:
        a = xp.exp(xp.mul(dt, xp.reshape(a, (heads,))))
    y, state = xp.scan(h, layer, x, dt, a, b, c, d, heads=heads, groups=groups)
    return cast(y, rows.dtype), state


@op(0x14, "SSM_RESET", state=CELL_STATE, source="as SSM_SCAN")
def ssm_reset(xp, h: R1("state", both=True), layer: IntOrReg(fmt="i")[0, 4] = -1):
    """state = 0 in every cell of LAYER (h of SSM_SCAN and the window of CONV); LAYER=-1: of every layer.

    Traps: a LAYER below -1, a handle that is no recurrent state."""
    return xp.reset_cells(h, layer)


@op(0x15, "CODEC_ENC", route="absent", shape="codes [frames, codebooks]", dtypes="F32 in, I32 out", state=CODEC_STATE,
    source="a residual vector-quantising audio codec, as the model says")
def codec_enc(xp, rd: Rd, pcm: R1, codec: R2("state", both=True), model: R3("state"), codebooks: U8[0] = 0):
    """rd = codes of the samples: encoder, then for each codebook the nearest centroid of what is left.

    pcm [n] at the model's rate, any n: what does not fill a frame waits in the codec state.  CODEBOOKS 0: all.
    Ties go to the lower index.  Errors: NaN or infinite samples; a model that is no codec."""


@op(0x16, "CODEC_DEC", route="absent", shape="pcm [frames * samples per frame]", dtypes="I32 in, F32 out",
    state=CODEC_STATE, source="as CODEC_ENC")
def codec_dec(xp, rd: Rd, codes: R1, codec: R2("state", both=True), model: R3("state")):
    """rd = samples of the codes: sum of the centroids, then the decoder; in [-1, 1].

    Errors: a code outside its codebook; a model that is no codec."""


@op(0x17, "AUDIO_ALIGN", route="absent", dtypes="I64", source="stream alignment by time stamps",
    key_aliases={"SR": "sample_rate", "FRAME": "frame_samples", "DELAY": "delay_ms"})
def audio_align(xp, rd: Rd, user: R1("int"), ai: R2("int"), sample_rate: U32[0] = 24000, frame_samples: U32[4] = 1920,
                delay_ms: F32[8] = 160.0):
    """rd = [user, ai, delta, frame] as I64: delta = ai - user ns, frame = floor(max(delta - delay, 0) / frame time).

    user and ai: time stamps in ns.  Frame time = FRAME_SAMPLES / SAMPLE_RATE s (80 ms by default).  Errors: a rate
    or frame of 0."""


@op(0x44, "DEPFORMER", route="absent", shape="codes [codebooks]", dtypes=FLOAT, state=DEPTH_STATE,
    source="depth transformer of a speech model",
    key_aliases={"NCB": "codebooks", "TEMP": "temperature", "TOPK": "top_k"})
def depformer(xp, rd: Rd, x: R1, model: R2("state"), kv: R3("state", both=True), codebooks: U16[0] = 0,
              temperature: F32[2] = 0.0, top_k: U16[6] = 0, layer: U16[8] = 0):
    """rd = one code for each codebook, sampled in order; each is fed back as input of the next.

    x [D]: hidden state of the temporal transformer; model: the bundle of weights.  TEMPERATURE 0: the largest logit,
    lowest index on ties; else a draw of the context's RNG among the TOP_K largest (0: all).  The KV stream is emptied
    first and holds the codebook steps afterwards.  Errors: a model without a depth transformer; NaN logits."""


@op(0x45, "STREAM_MERGE", route="absent", shape="shape of a", dtypes=FLOAT, state=STATELESS, source="linear mix")
def stream_merge(xp, rd: Rd, a: R1, b: R2, gain: F32[0] = 0.5):
    """rd = gain * a + (1 - gain) * b, elementwise.  Errors: shapes that differ; a gain that is not finite."""


@op(0x46, "VAD_DETECT", route="absent", shape="[1]", dtypes="F32", state=STATELESS,
    source="short-time energy, zero crossings")
def vad_detect(xp, rd: Rd, x: R1, model: R2("state") = None, mode: Enum("ENERGY ZCR ML")[0] = "ENERGY"):
    """rd = voice activity of the samples x: ENERGY sqrt(mean x^2); ZCR the share of neighbours with x[i] x[i+1] < 0;
    ML the model's probability.  Errors: no samples (ZCR: fewer than 2); ML without a model."""


@op(0x47, "AUDIO_RESAMPLE", route="absent", shape="[ceil(n * to / from)]", dtypes="F32", state=CODEC_STATE,
    source="windowed-sinc polyphase resampling", key_aliases={"SRC": "from_", "DST": "to"})
def audio_resample(xp, rd: Rd, x: R1, window: R2("state", both=True) = None, from_: U32[0] = 24000, to: U32[4] = 16000,
                   filter: Enum("SINC LINEAR")[8] = "SINC", taps: U16[10] = 32):
    """rd[i] = sum_j h(i * from / to - j) x[j], h a Kaiser-windowed sinc cut off at half the lower rate.

    LINEAR: interpolation between the two neighbours.  With a window the signal goes on where the last call ended,
    without one it starts and ends in zeros.  Errors: a rate of 0."""


@op(0x48, "AUDIO_FILTER", route="absent", shape="shape of x", dtypes="F32", state=CODEC_STATE,
    source="direct-form filters")
def audio_filter(xp, rd: Rd, x: R1, b: R2, a: R3 = None, window: R4("state", both=True) = None,
                 mode: Enum("FIR IIR")[0] = "FIR"):
    """FIR: y[n] = sum_j b[j] x[n - j].  IIR: a[0] y[n] = sum_j b[j] x[n - j] - sum_{j>0} a[j] y[n - j].

    Samples before the first come from the window, or are 0.  Errors: no taps; IIR with a[0] = 0 or without a."""


@op(0x49, "AUDIO_WINDOW", route="absent", shape="shape of x", dtypes="F32", state=STATELESS,
    source="periodic Hann and Hamming windows")
def audio_window(xp, rd: Rd, x: R1, type: Enum("HANN HAMMING")[0] = "HANN"):
    """rd[n] = x[n] w[n] over the last axis of length N: HANN w = 0.5 - 0.5 cos(2 pi n / N); HAMMING 0.54 - 0.46 cos.

    N = 1: w = 0 (HANN) or 0.08 (HAMMING)."""
