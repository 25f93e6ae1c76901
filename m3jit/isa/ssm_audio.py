"""State-space scans (0x13, 0x14) and audio (0x15-0x17, 0x44-0x49)."""
from m3jit.isa.fields import F32, R, R1, R2, R3, R4, U8, U16, U32, Enum, IntOrReg, Precision, PayloadFlag, Rd
from m3jit.isa.table import STATELESS, StateDoc, op

SCAN_STATE = StateDoc("a state value of the context root: h [d_inner, d_state] and the convolution window of"
                        " each layer",
                      "O(1): the value is immutable and shared", "the value of the snapshot is put back")
CODEC_STATE = StateDoc("a codec window of the context root (the samples or frames the next call still needs)",
                       "O(1): the value is immutable and shared", "the window of the snapshot is put back")
DEPTH_STATE = StateDoc("keys and values of (stream, layer) in a KV stream of the context root",
                       "O(1): pages are append-only and shared",
                       "the stream's length and pages of the snapshot are put back")
FLOAT = "F32 F16 BF16"


@op(0x13, "SSM_SCAN", route="absent", shape="y: shape of x [T, d_inner]", dtypes=FLOAT, state=SCAN_STATE,
    source="selective state-space recurrence (Mamba, Mamba-2)", key_aliases={"Z": "gate"})
def ssm_scan(xp, rd: Rd, x: R1, h: R2("state", both=True), dt: R3, a: R4, b: R[0] = None, c: R[1] = None,
             d: R[2] = None, gate: R[3] = None, conv: R[4] = None, conv_bias: R[5] = None, dt_bias: R[6] = None,
             softplus: PayloadFlag(0)[7] = False, d_inner: U16[8] = 0, d_state: U16[10] = 0, layer: U16[12] = 0,
             heads: U16[14] = 0, groups: U16[16] = 1, precision: Precision = "FP32"):
    """h = h * exp(dt * A) + dt * B x;  y = C h + D * x, for each row of x in order.

    x [T, d_inner], dt [T, d_inner] (HEADS given: [T, heads], shared by a head's channels), A [d_inner, d_state]
    (heads: [heads]) already negative, B and C [T, groups * d_state], D [d_inner] or absent (0).  SOFTPLUS: dt becomes
    log(1 + exp(dt + DT_BIAS)).  CONV [d_inner, w]: a causal convolution of width w and SiLU on x first, its last w - 1
    rows kept in the state.  GATE z: y * SiLU(z).  D_INNER and D_STATE 0: taken from the operands.  LAYER picks the
    state's layer; an unused one starts at zero.  Errors: shapes that disagree; T = 0 leaves the state as it is."""


@op(0x14, "SSM_RESET", route="absent", state=SCAN_STATE, source="as SSM_SCAN")
def ssm_reset(m, h: R1("state", both=True), layer: IntOrReg(fmt="i")[0, 4] = -1):
    """h[layer] = 0, with its convolution window; LAYER=-1: every layer.  Traps: a handle that is not a scan state."""


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
