"""Neural dynamics, diffusion, trees, distances (0x20-0x25), retrieval and classical learning (0x50-0x5F), training
(0xF4-0xF9)."""
from typing import Any

from m3jit.isa.fields import (NO_STRING, F32, R1, R2, R3, R4, U8, U16, U32, Enum, FloatOrReg, I64, IntOrReg,
                              PayloadFlag, Precision, Rd, Text)
from m3jit.isa.forms import in_f32, product, stored
from m3jit.isa.table import STATELESS, StateDoc, op

SPIKING = StateDoc("membrane and refractory values of a spiking state of the context root",
                   "O(1): immutable and shared",
                   "the values of the snapshot are put back")
INDEX = StateDoc("a vector index (region 0xA) reached from the context root", "O(1): a persistent structure",
                 "the index of the snapshot is put back")
RECURRENT = StateDoc("a fast-weight matrix of the context root", "O(1): immutable and shared",
                     "the matrix of the snapshot is put back")
TRAINED = StateDoc("gradients and optimizer moments (regions 0x16, 0x17) reached from the context root",
                   "O(1): immutable and shared", "the values of the snapshot are put back")
FLOAT = "F32 F16 BF16"
METRICS = "EUCLID COSINE MANHATTAN DOT"


@op(0x20, "SPIKE_STEP", route="absent", shape="spikes: shape of current", dtypes="F32", state=SPIKING,
    source="leaky integrate-and-fire neurons", key_aliases={"THRESH": "threshold", "REFRACT": "refractory"})
def spike_step(xp, rd: Rd, state: R1("state", both=True), current: R2, pack: R3 = None, threshold: F32[0] = 1.0,
               decay: F32[4] = 0.9, reset: F32[8] = 0.0, layer: U8[12] = 0, refractory: U8[13] = 2):
    """v = (v + I) * decay; a neuron that is not refractory and has v >= threshold fires: spike 1, v = reset.

    A neuron that fired waits REFRACTORY steps.  rd = spikes, 0 or 1.  PACK [4] = threshold, decay, reset, refractory
    instead of the options.  Errors: decay outside [0, 1]; sizes that differ; NaN or infinity in v or I."""


@op(0x21, "DENOISE_STEP", route="absent", shape="shape of x", dtypes=FLOAT, writes=("rng",),
    state=StateDoc("the context's RNG stream", "O(1), part of the context root", "the RNG of the snapshot is put back"),
    source="ancestral sampling of denoising diffusion (DDPM; SIGMA=0: DDIM)", key_aliases={"T": "timestep"})
def denoise_step(xp, rd: Rd, x: R1, eps: R2, schedule: R3 = None, alpha: FloatOrReg()[0, 16] = 0.98,
                 beta: F32[4] = 0.02, sigma: F32[8] = 0.0, timestep: U32[12] = 0):
    """rd = (x - beta / sqrt(1 - alpha) * eps) / sqrt(1 - beta) + sigma * z, z standard normal from the context's RNG.

    ALPHA is the cumulative product of the schedule; SCHEDULE [steps, 3] gives (alpha, beta, sigma) of TIMESTEP
    instead.  SIGMA=0 draws nothing.  Errors: alpha outside (0, 1], beta outside [0, 1); alpha = 1 with eps not 0."""


@op(0x22, "FOREST", route="absent", shape="[trees] or [1]", dtypes="F32", state=STATELESS, source="decision trees")
def forest(xp, rd: Rd, features: R1, nodes: R2, leaves: R3 = None, trees: U16[0] = 1, depth: U16[2] = 1,
           mode: Enum("VOTE MEAN EACH")[4] = "VOTE"):
    """Walk each tree from its root: go right iff features[f] > threshold (NaN goes left), at most DEPTH steps.

    NODES [trees * (2^depth - 1), 4] = feature, threshold, left, right (left < 0: a leaf, its value in LEAVES at the
    same place).  VOTE: the most frequent leaf value, the lower one on ties; MEAN: their mean; EACH: all of them.  NODES
    may be a model handle.  Errors: DEPTH outside 1..16; a feature or child outside its table."""


@op(0x23, "DISTANCE", route="absent", shape="[N] or [2, k]", dtypes="F32", state=STATELESS, source="vector metrics",
    key_aliases={"TOPK": "top_k", "K": "top_k"})
def distance(xp, rd: Rd, query: R1, bank: R2, top_k: U16[0] = 0, metric: Enum(METRICS)[2] = "EUCLID"):
    """rd[i] = distance of query [D] to row i of bank [N, D].

    EUCLID sqrt(sum (q - r)^2); COSINE 1 - q r / (|q| |r|), 1 when a norm is 0; MANHATTAN sum |q - r|; DOT -q r.
    TOP_K > 0: row 0 the k smallest distances ascending, row 1 their indices; ties to the lower index."""


@op(0x24, "RANK1_UPDATE", route="absent", shape="shape of h", dtypes=FLOAT, state=RECURRENT,
    source="Hebbian and delta-rule fast weights")
def rank1_update(xp, rd: Rd, h: R1, v: R2, k: R3, mask: R4 = None, alpha: F32[0] = 1.0, beta: F32[4] = 1.0,
                 mode: Enum("HEBBIAN DELTA FORGET")[8] = "HEBBIAN"):
    """rd = alpha * mask * h + u k^T: u = beta v (HEBBIAN, FORGET) or beta (v - h k) / (1 + beta |k|^2) (DELTA).

    h [D, K], v [D], k [K], mask [D, K] or 1.  FORGET needs alpha in (0, 1].  Errors: sizes that differ; alpha or beta
    not finite."""


@op(0x25, "ODE_STEP", route="absent", shape="shape of x", dtypes="F32", state=STATELESS,
    source="explicit Runge-Kutta steps of a continuous-time network")
def ode_step(xp, rd: Rd, x: R1, u: R2 = None, w: R3 = None, b: R4 = None, dt: FloatOrReg()[0, 4] = 0.01,
             method: Enum("EULER RK2 RK4")[5] = "EULER"):
    """One step of x' = silu(W x + b + u): EULER x + dt k1; RK2 x + dt k2 (midpoint); RK4 (k1 + 2 k2 + 2 k3 + k4) / 6.

    x [n], W [n, n] (absent: -0.1 I), b and u [n] or absent; u is constant over the step.  Errors: dt <= 0."""


# -- retrieval ----------------------------------------------------------------------------------------------------

@op(0x50, "RAG_INDEX_ADD", route="absent", dtypes=FLOAT, state=INDEX, source="vector index, flat, IVF or HNSW")
def rag_index_add(m, rd: Rd("int"), index: R1("state", both=True), vec: R2 = None, id: R3("int") = None,
                  mode: Enum("FLAT IVF HNSW PQ")[0] = "FLAT", file: Text[1] = NO_STRING, n_probe: U16[9] = 8,
                  links: U16[11] = 16):
    """Add vectors [D] or [N, D]; an empty handle makes an index of that D.  rd = number of vectors in it.

    ID gives the first vector's id, else ids count on from the largest used.  MODE is fixed by the first call.  FILE
    adds the rows of a .npy file instead.  Errors: another D; an id in use; NaN or infinity."""


@op(0x51, "RAG_INDEX_DEL", route="absent", state=INDEX, source="as RAG_INDEX_ADD")
def rag_index_del(m, rd: Rd("int"), index: R1("state", both=True), id: R2("int")):
    """Remove the vector with that id; rd = number left.  Errors: an unknown id.  Ids are not used again."""


@op(0x52, "RAG_SEARCH", route="absent", shape="[2, k]", dtypes="F32", state=INDEX, source="nearest-neighbour search",
    key_aliases={"TOPK": "top_k", "K": "top_k"})
def rag_search(m, rd: Rd, query: R1, index: R2("state"), ids: R3("tensor", dest=True) = None,
               top_k: IntOrReg(fmt="i")[0, 4] = 1, metric: Enum("COSINE EUCLID DOT MANHATTAN")[5] = "COSINE",
               n_probe: U16[6] = 8):
    """rd = the k smallest distances ascending, ids (I64) = their vectors' ids; ties to the lower id.

    Metrics as in DISTANCE.  Fewer than k vectors: all of them.  Errors: another D; an empty index."""


@op(0x53, "EMBED_LOOKUP", route="absent", shape="[1, D]", dtypes=FLOAT, state=STATELESS, source="embedding bag")
def embed_lookup(xp, rd: Rd, ids: R1, table: R2, mode: Enum("MEAN SUM MAX")[0] = "MEAN"):
    """rd = mean, sum or maximum of the rows of table [V, D] named by ids, in order.  Errors: no ids; an id outside
    V."""


@op(0x54, "HASH_BUCKET", route="absent", shape="[N]", dtypes="I64", state=STATELESS,
    source="locality-sensitive hashing by random projections")
def hash_bucket(xp, rd: Rd, vec: R1, planes: R2):
    """rd[n] = sum_b 2^b [planes_b . vec_n > 0]: planes [B, D], vec [D] or [N, D], B <= 62."""


@op(0x55, "QUANTIZE_VEC", route="absent", shape="[N]", dtypes="I32", state=STATELESS, source="vector quantisation")
def quantize_vec(xp, rd: Rd, vec: R1, codebook: R2, metric: Enum(METRICS)[0] = "EUCLID"):
    """rd[n] = index of the nearest row of codebook [K, D] to vec_n; ties to the lower index."""


@op(0x56, "PQ_ENCODE", route="absent", shape="[N, nsub]", dtypes="I32", state=STATELESS, source="product quantisation")
def pq_encode(xp, rd: Rd, vec: R1, codebook: R2, nsub: U16[0]):
    """rd[n, s] = nearest centroid of part s of vec_n: codebook [nsub * K, D / nsub], squared Euclidean, ties low.

    Errors: D or the rows of the codebook are no multiple of NSUB."""


@op(0x57, "PQ_DECODE", route="absent", shape="[N, D]", dtypes="F32", state=STATELESS, source="product quantisation")
def pq_decode(xp, rd: Rd, codes: R1, codebook: R2, nsub: U16[0]):
    """rd[n] = the centroids of codes[n] side by side.  Errors: a code outside 0..K - 1."""


@op(0x58, "KMEANS_STEP", route="absent", shape="[K, D]", dtypes="F32", state=STATELESS, source="Lloyd's algorithm")
def kmeans_step(xp, rd: Rd, x: R1, centroids: R2, labels: R3("tensor", dest=True) = None):
    """rd = mean of the rows of x nearest to each centroid (a centroid without rows stays), labels = their numbers.

    Ties to the lower centroid; sums run in row order."""


@op(0x59, "LINEAR_REG", route="absent", shape="[N]", dtypes=FLOAT, state=STATELESS, source="linear model")
def linear_reg(xp, rd: Rd, x: R1, w: R2, bias: R3 = None):
    """rd = x w + bias: x [N, D], w [D] or [D, M]."""


@op(0x5A, "LOGISTIC_REG", route="absent", shape="[N]", dtypes=FLOAT, state=STATELESS, source="logistic model")
def logistic_reg(xp, rd: Rd, x: R1, w: R2, bias: R3 = None):
    """rd = 1 / (1 + exp(-(x w + bias))); several columns of w: softmax over them."""


@op(0x5B, "NAIVE_BAYES", route="absent", shape="[N, C]", dtypes="F32", state=STATELESS, source="naive Bayes")
def naive_bayes(xp, rd: Rd, x: R1, table: R2, prior: R3, variance: R4 = None,
                mode: Enum("MULTINOMIAL GAUSSIAN BERNOULLI")[0] = "MULTINOMIAL"):
    """rd = log prior + sum_d log p(x_d | class), normalised over classes (log-sum-exp).

    MULTINOMIAL: x counts, table log probabilities [C, D].  BERNOULLI: x 0 or 1.  GAUSSIAN: table means, variance [C,
    D]. Errors: a variance <= 0."""


@op(0x5C, "SVM_PREDICT", route="absent", shape="[N]", dtypes="F32", state=STATELESS, source="support vector machines")
def svm_predict(xp, rd: Rd, x: R1, vectors: R2, coef: R3, gamma: F32[0] = 1.0, coef0: F32[4] = 0.0, degree: U8[8] = 3,
                kernel: Enum("LINEAR RBF POLY SIGMOID")[9] = "RBF", intercept: F32[10] = 0.0):
    """rd[n] = sum_i coef_i K(vectors_i, x_n) + intercept.

    K: LINEAR u v; RBF exp(-gamma |u - v|^2); POLY (gamma u v + coef0)^degree; SIGMOID tanh(gamma u v + coef0)."""


@op(0x5D, "PCA_STEP", route="absent", shape="[D]", dtypes="F32", state=STATELESS, source="power iteration")
def pca_step(xp, rd: Rd, x: R1, v: R2, mean: R3 = None):
    """rd = X^T X v / |X^T X v| with X = x - mean: one power-iteration step.  Errors: a zero vector."""


@op(0x5E, "STANDARDIZE", route="absent", shape="shape of x", dtypes=FLOAT, state=STATELESS, source="feature scaling")
def standardize(xp, rd: Rd, x: R1, shift: R2 = None, scale: R3 = None, mode: Enum("ZSCORE MINMAX")[0] = "ZSCORE",
                axis: U8[1] = 0, eps: F32[2] = 0.0):
    """ZSCORE: (x - mean) / sqrt(var + eps); MINMAX: (x - min) / (max - min); along AXIS, or with SHIFT and SCALE given.

    A column without spread gives 0."""


@op(0x5F, "NEAREST_CENTROID", route="absent", shape="[N]", dtypes="I64", state=STATELESS, source="nearest centroid")
def nearest_centroid(xp, rd: Rd, x: R1, centroids: R2, metric: Enum(METRICS)[0] = "EUCLID"):
    """rd[n] = index of the centroid nearest to x_n; ties to the lower index."""


# -- training -----------------------------------------------------------------------------------------------------

@op(0xF4, "GRAD_ACCUM", route="absent", dtypes=FLOAT, state=TRAINED, source="gradient accumulation")
def grad_accum(xp, grads: R1("state", both=True), grad: R2, param: U32[0] = 0, scale: FloatOrReg()[4, 8] = 1.0):
    """grads[param] += scale * grad, in f32.  An empty handle or a new PARAM starts at 0.  Errors: another shape."""


@op(0xF5, "GRAD_ZERO", route="absent", state=TRAINED, source="gradient accumulation")
def grad_zero(xp, grads: R1("state", both=True), param: I64[0] = -1):
    """grads[param] = 0; PARAM=-1: all."""


@op(0xF6, "OPTIMIZER_STEP", route="absent", dtypes=FLOAT, state=TRAINED, source="SGD, Adam, AdamW, Lion")
def optimizer_step(xp, rd: Rd, opt: R1("state", both=True), params: R2, grads: R3("state"), param: U32[0] = 0,
                   lr: FloatOrReg()[4, 8] = 0.0):
    """rd = params after one step of the optimizer; LR=0: the rate of OPTIMIZER_INIT.

    ADAM: m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; p -= lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps).
    ADAMW: also p -= lr decay p.  SGD: m = b1 m + g; p -= lr m.  LION: p -= lr (sign(b1 m + (1 - b1) g) + decay p)."""


@op(0xF7, "OPTIMIZER_INIT", route="absent", state=TRAINED, source="SGD, Adam, AdamW, Lion")
def optimizer_init(xp, opt: R1("state", both=True), type: Enum("SGD ADAM ADAMW LION")[0] = "ADAM", lr: F32[1] = 1e-3,
                   beta1: F32[5] = 0.9, beta2: F32[9] = 0.999, eps: F32[13] = 1e-8, decay: F32[17] = 0.0):
    """opt = a new optimizer with all moments 0 and step 0.  Errors: beta outside [0, 1); lr or eps negative."""


@op(0xF8, "LORA_APPLY", shape="[.., N]", dtypes=FLOAT, state=STATELESS, source="Hu et al. 2021, LoRA")
def lora_apply(xp, rd: Rd, x: R1, base: R2, a: R3, b: R4, scale: FloatOrReg()[0, 4] = 1.0,
               precision: Precision = "FP32"):
    """rd = x base^T + SCALE ((x a^T) b^T): x [.., K], base [N, K], a [rank, K], b [N, rank].

    The first product is MATVEC's with TRANSPOSE and this PRECISION (INT8: a block-quantised base, x quantised to int8);
    the two products of the adapter are canonical float dots with the exact values of a and b.  Their result times SCALE
    is added to the first product, all in f32; BF16 and FP16 round once at the end.  SCALE is usually alpha / rank.
    Traps: shapes that do not fit, INT8 with a float base."""
    _check_adapter(xp, base, a, b)
    y = product(xp, x, base, True, precision)
    delta = xp.matmul(xp.matmul(x, a, True), b, True)
    return stored(xp, xp.add(y, xp.mul(delta, scale)), precision)


@op(0xF9, "LORA_MERGE", shape="that of base", dtypes=FLOAT, state=STATELESS, source="Hu et al. 2021, LoRA")
def lora_merge(xp, rd: Rd, base: R1, a: R2, b: R3, scale: FloatOrReg()[0, 4] = 1.0,
               subtract: PayloadFlag(0)[5] = False):
    """rd = base + SCALE (b a), base [N, K], a [rank, K], b [N, rank]; SUBTRACT: base - SCALE (b a).

    b a is a canonical float dot over the rank; times SCALE, then the sum, in f32, rounded once to base's type.
    Subtracting what was added does not restore the bits of base: keep the base, or a snapshot.  Traps: shapes that do
    not fit; a block-quantised base (DEQUANT it first)."""
    if base.dtype.is_block:
        raise xp.error(f"LORA_MERGE changes a float weight, got {base.dtype.name}; DEQUANT it first, or use "
                       "LORA_APPLY, which leaves the base as it is")
    _check_adapter(xp, base, a, b)
    delta = xp.mul(xp.matmul(b, a, False), scale)
    return in_f32(xp, base, lambda w: xp.sub(w, delta) if subtract else xp.add(w, delta))


def _check_adapter(xp: Any, base: Any, a: Any, b: Any) -> None:
    """base [N, K], a [rank, K], b [N, rank] of float or weight types."""
    shapes = [t.shape for t in (base, a, b)]
    if any(len(s) != 2 for s in shapes) or shapes[1][1] != shapes[0][1] or shapes[2][0] != shapes[0][0] or \
            shapes[1][0] != shapes[2][1]:
        raise xp.error("an adapter of a base [N, K] is a [rank, K] and b [N, rank], got base {}, a {}, b {}".format(
            *([*s] for s in shapes)))
