/* The inner passes over rows, without the GIL: see kernel.py, which describes them and chooses between this and NumPy.
 *
 * Every function computes the bits of NumPy's definition in correction.py, initial.py and precision.py: IEEE float32,
 * each product and sum rounded by itself, in this order.
 *
 * Buffers come from the network and from files. Their lengths are compared with what the arguments say before anything
 * is read, and a slot that lies outside its block is an error; no number in a buffer is trusted. Stored values need not
 * be aligned.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <float.h>
#include <limits.h>
#include <stdint.h>
#include <string.h>

/* Options that change bits, as CFLAGS may hold them, are refused here, whatever builds the file; NumPy computes then.
 * Options that undo them would protect one build only. clang has no macros for most of them, but pragmas that undo all.
 * What the linker is given does not show here: see pyproject.toml.
 */
#if defined __FAST_MATH__ || defined __ASSOCIATIVE_MATH__ || defined __RECIPROCAL_MATH__ \
    || defined __NO_SIGNED_ZEROS__ || (defined __FINITE_MATH_ONLY__ && __FINITE_MATH_ONLY__)
#error "-ffast-math and the options that it consists of change the bits of rows"
#endif
#if FLT_EVAL_METHOD != 0
#error "float must be computed in its own precision"
#endif
#ifdef __clang__ /* gcc takes -ffp-contract=off alone */
#pragma float_control(precise, on)
#pragma STDC FP_CONTRACT OFF
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "blocks and messages are little-endian"
#endif

/* A change of any function's arguments or results; kernel.py takes no other. */
#define INTERFACE 8

typedef float __attribute__((aligned(1), may_alias)) packed_float;
typedef uint16_t __attribute__((aligned(1), may_alias)) packed_u16;
typedef int64_t __attribute__((aligned(1), may_alias)) packed_i64;
typedef uint64_t __attribute__((aligned(1), may_alias)) packed_u64;
typedef uint64_t (*checksum_function)(const void *, size_t, uint64_t); /* XXH3_64bits_withSeed */

enum { WEIGHT, MOMENTUM_BUFFER };
enum { HEADER_BYTES = 16, CHECKSUM_AT = 8, GROUP_BYTES = 2048 };

/* ---- arguments */

/* Rows of a table, and the blocks that they lie in: block b has rows number starts[b] to starts[b + 1] of all. */
typedef struct {
    Py_ssize_t rows, dim, value_bytes; /* of a block */
    unsigned long long initial_seed, rounding_seed, checksum_address;
    float init_std;
    Py_buffer quantiles, numbers, write_ids, starts, slots;
    Py_ssize_t num_rows, num_blocks;
    Py_buffer *blocks; /* `obj` is NULL for one that was never written */
    float *scratch;    /* 5 rows */
    /* derived from these: */
    Py_ssize_t row_bytes, group_rows, num_groups, last_step_at, weight_at, momentum_at, groups_at, num_bytes;
    const packed_i64 *number, *start, *slot;
    checksum_function checksum;
} Places;

static int has_items(const Py_buffer *view, Py_ssize_t count, Py_ssize_t item_bytes, const char *name)
{
    if (view->len / item_bytes == count && view->len % item_bytes == 0)
        return 1;
    PyErr_Format(PyExc_ValueError, "%s has %zd bytes, not %zd items of %zd", name, view->len, count, item_bytes);
    return 0;
}

/* See blocks.py. */
static int lay_out(Places *p)
{
    if (p->rows < 1 || p->rows >= 1 << 16 || p->dim < 1 || p->dim >= 1 << 24
        || (p->value_bytes != 2 && p->value_bytes != 4) || p->checksum_address == 0) {
        PyErr_SetString(PyExc_ValueError, "there is no such block");
        return 0;
    }
    p->row_bytes = p->dim * p->value_bytes;
    p->group_rows = p->row_bytes < GROUP_BYTES ? GROUP_BYTES / p->row_bytes : 1;
    p->num_groups = (p->rows - 1) / p->group_rows + 1;
    p->last_step_at = HEADER_BYTES + (p->rows + 63) / 64 * 8;
    p->weight_at = p->last_step_at + 8 * p->rows;
    p->momentum_at = p->weight_at + p->row_bytes * p->rows;
    p->groups_at = p->momentum_at + p->row_bytes * p->rows;
    p->num_bytes = p->groups_at + 8 * p->num_groups;
    return 1;
}

static int are_inside(const Places *p)
{
    if (p->start[0] != 0 || p->start[p->num_blocks] != p->num_rows)
        return 0;
    for (Py_ssize_t b = 0; b < p->num_blocks; b++)
        if (p->start[b] > p->start[b + 1])
            return 0;
    int outside = 0;
    for (Py_ssize_t i = 0; i < p->num_rows; i++)
        outside |= (uint64_t)p->slot[i] >= (uint64_t)p->rows;
    return !outside;
}

static int fill_places(Places *p, PyObject *blocks)
{
    if (!lay_out(p))
        return 0;
    p->num_rows = p->slots.len / 8;
    p->num_blocks = PyList_Size(blocks);
    p->number = p->numbers.buf;
    p->start = p->starts.buf;
    p->slot = p->slots.buf;
    p->checksum = (checksum_function)(uintptr_t)p->checksum_address;
    if (!has_items(&p->quantiles, 65536, 4, "quantiles") || !has_items(&p->numbers, p->num_blocks, 8, "numbers")
        || !has_items(&p->write_ids, p->num_blocks, 8, "write_ids")
        || !has_items(&p->starts, p->num_blocks + 1, 8, "starts"))
        return 0;
    if (!are_inside(p) || p->num_rows > PY_SSIZE_T_MAX / 16 / (p->row_bytes + 8)) {
        PyErr_SetString(PyExc_ValueError, "a row lies outside its block, or there are too many");
        return 0;
    }
    p->blocks = PyMem_Calloc(p->num_blocks + 1, sizeof *p->blocks);
    p->scratch = PyMem_Calloc(5 * p->dim, sizeof *p->scratch);
    if (p->blocks == NULL || p->scratch == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    for (Py_ssize_t b = 0; b < p->num_blocks; b++) {
        PyObject *block = PyList_GetItem(blocks, b);
        if (block == NULL || (block != Py_None && PyObject_GetBuffer(block, &p->blocks[b], PyBUF_SIMPLE) < 0))
            return 0;
    }
    return 1;
}

static void release_places(Places *p)
{
    for (Py_ssize_t b = 0; p->blocks != NULL && b < p->num_blocks; b++)
        PyBuffer_Release(&p->blocks[b]);
    PyMem_Free(p->blocks);
    PyMem_Free(p->scratch);
    Py_buffer *views[] = {&p->quantiles, &p->numbers, &p->write_ids, &p->starts, &p->slots};
    for (int i = 0; i < 5; i++)
        PyBuffer_Release(views[i]);
}

/* A converter of PyArg_ParseTuple, which calls it once more, without an object, if a later argument is wrong. */
static int take_places(PyObject *object, void *out)
{
    Places *p = out;
    PyObject *blocks;
    if (object == NULL) {
        release_places(p);
        return 1;
    }
    memset(p, 0, sizeof *p);
    if (!PyTuple_Check(object)) {
        PyErr_SetString(PyExc_TypeError, "places must be a tuple");
        return 0;
    }
    if (!PyArg_ParseTuple(object, "(nnnKKKfy*)O!y*y*y*y*", &p->rows, &p->dim, &p->value_bytes, &p->initial_seed,
                          &p->rounding_seed, &p->checksum_address, &p->init_std, &p->quantiles, &PyList_Type, &blocks,
                          &p->numbers, &p->write_ids, &p->starts, &p->slots))
        return 0;
    if (!fill_places(p, blocks)) {
        release_places(p);
        return 0;
    }
    return Py_CLEANUP_SUPPORTED;
}

/* ---- checksums: see blocks.py */

/* Output number `index` of a stream of splitmix.py; the seed is mixed already. */
static inline uint64_t splitmix64(uint64_t mixed_seed, uint64_t index)
{
    uint64_t z = index * UINT64_C(0x9E3779B97F4A7C15) + mixed_seed;
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

/* mix_seed() of splitmix.py. */
static inline uint64_t mixed(uint64_t seed)
{
    return splitmix64(seed, 1);
}

static uint64_t checksum_of_root(const Places *p, const unsigned char *bytes, uint64_t number, uint64_t write_id)
{
    uint64_t seed = mixed(mixed(number) ^ write_id);
    seed = p->checksum(bytes + HEADER_BYTES, (size_t)(p->weight_at - HEADER_BYTES), seed);
    return p->checksum(bytes + p->groups_at, (size_t)(8 * p->num_groups), seed);
}

static uint64_t checksum_of_group(const Places *p, const unsigned char *bytes, uint64_t number, Py_ssize_t group)
{
    Py_ssize_t first = group * p->group_rows, left = p->rows - first;
    size_t size = (size_t)((left < p->group_rows ? left : p->group_rows) * p->row_bytes);
    uint64_t seed = p->checksum(bytes + p->weight_at + first * p->row_bytes, size, (number << 16) + (uint64_t)group);
    return p->checksum(bytes + p->momentum_at + first * p->row_bytes, size, seed);
}

/* The first 8 bytes of every block of the table. */
static void write_start(const Places *p, unsigned char *out)
{
    uint16_t sizes[2] = {(uint16_t)p->value_bytes, (uint16_t)p->rows};
    uint32_t dim = (uint32_t)p->dim;
    memcpy(out, sizes, 4);
    memcpy(out + 4, &dim, 4);
}

/* Whether the content of block b is as its write left it, as far as the values in some slots depend on it: those of
 * number `i` to `end`, or if there are no slots, the first `end` ones. */
static int is_sound(const Places *p, Py_ssize_t b, const unsigned char *bytes, const packed_i64 *slots, Py_ssize_t i,
                    Py_ssize_t end)
{
    unsigned char start[CHECKSUM_AT];
    write_start(p, start);
    uint64_t stored, number = (uint64_t)p->number[b], write_id = ((const packed_u64 *)p->write_ids.buf)[b];
    memcpy(&stored, bytes + CHECKSUM_AT, 8);
    if (memcmp(bytes, start, CHECKSUM_AT) != 0 || checksum_of_root(p, bytes, number, write_id) != stored)
        return 0;
    const packed_u64 *of_groups = (const packed_u64 *)(bytes + p->groups_at);
    for (Py_ssize_t group, known = -1; i < end; i++, known = group) {
        group = (slots == NULL ? i : slots[i]) / p->group_rows;
        if (group != known && checksum_of_group(p, bytes, number, group) != of_groups[group])
            return 0;
    }
    return 1;
}

static PyObject *look(PyObject *module, PyObject *args)
{
    (void)module;
    Places p;
    Py_buffer last_step;
    int verify;
    if (!PyArg_ParseTuple(args, "O&pw*", take_places, &p, &verify, &last_step))
        return NULL;
    PyObject *result = NULL;
    if (has_items(&last_step, p.num_rows, 8, "last_step")) {
        Py_ssize_t bad = -1;
        Py_BEGIN_ALLOW_THREADS
        packed_i64 *out = last_step.buf;
        for (Py_ssize_t b = 0; b < p.num_blocks && bad < 0; b++) {
            const unsigned char *bytes = p.blocks[b].buf;
            Py_ssize_t i = p.start[b], end = p.start[b + 1];
            if (p.blocks[b].obj == NULL) {
                for (; i < end; i++)
                    out[i] = 0;
            } else if (p.blocks[b].len != p.num_bytes || (verify && !is_sound(&p, b, bytes, p.slot, i, end))) {
                bad = b;
            } else {
                const packed_i64 *steps = (const packed_i64 *)(bytes + p.last_step_at);
                for (; i < end; i++)
                    out[i] = steps[p.slot[i]];
            }
        }
        Py_END_ALLOW_THREADS
        result = PyLong_FromSsize_t(bad);
    }
    PyBuffer_Release(&last_step);
    release_places(&p);
    return result;
}

/* ---- numbers: see initial.py, precision.py and correction.py */

static void initial_row(const Places *p, uint64_t row, packed_float *restrict out)
{
    const packed_float *quantiles = p->quantiles.buf;
    Py_ssize_t dim = p->dim;
    uint64_t words = (uint64_t)(dim + 1) / 2, first = row * words;
    for (Py_ssize_t j = 0; j + 1 < dim; j += 2) {
        uint64_t z = splitmix64(p->initial_seed, first + (uint64_t)j / 2);
        out[j] = (quantiles[z & 0xFFFF] + quantiles[z >> 16 & 0xFFFF]) * p->init_std;
        out[j + 1] = (quantiles[z >> 32 & 0xFFFF] + quantiles[z >> 48]) * p->init_std;
    }
    if (dim % 2) {
        uint64_t z = splitmix64(p->initial_seed, first + words - 1);
        out[dim - 1] = (quantiles[z & 0xFFFF] + quantiles[z >> 16 & 0xFFFF]) * p->init_std;
    }
}

static void widen(const void *from, Py_ssize_t dim, packed_float *restrict out)
{
    const packed_u16 *stored = from;
    for (Py_ssize_t j = 0; j < dim; j++) {
        uint32_t bits = (uint32_t)stored[j] << 16;
        memcpy(out + j, &bits, 4);
    }
}

static void round_row(const Places *p, uint64_t row, int64_t step, int array, const packed_float *restrict values,
                      packed_u16 *restrict out)
{
    const uint32_t largest_bits = 0x7F7F0000;
    float largest;
    memcpy(&largest, &largest_bits, 4);
    Py_ssize_t dim = p->dim;
    uint64_t words = (uint64_t)(dim + 3) / 4, seed = p->rounding_seed;
    uint64_t stream = splitmix64(seed, splitmix64(seed, row) + (uint64_t)step) + (uint64_t)array * words;
    for (Py_ssize_t first = 0; first < dim; first += 4) {
        uint64_t random = splitmix64(seed, stream + (uint64_t)first / 4);
        Py_ssize_t last = first + 4 < dim ? first + 4 : dim;
        for (Py_ssize_t j = first; j < last; j++, random >>= 16) {
            float value = values[j];
            value = value > largest ? largest : value < -largest ? -largest : value;
            uint32_t bits;
            memcpy(&bits, &value, 4);
            out[j] = (uint16_t)((bits + (uint32_t)(random & 0xFFFF)) >> 16);
        }
    }
}

/* The initial weights of a row, as they are stored. */
static void draw_row(const Places *p, uint64_t row, void *out)
{
    initial_row(p, row, p->value_bytes == 4 ? out : p->scratch);
    if (p->value_bytes == 2)
        round_row(p, row, 0, WEIGHT, p->scratch, out);
}

/* The uppermost bit is set if the value is infinite or NaN: the greatest finite number has the greatest bits but for the
 * sign. Combined by |, it tells so of many values. */
static inline uint32_t beyond_finite(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return UINT32_C(0x7F7FFFFF) - (bits & 0x7FFFFFFF);
}

/* correction.correct for the weights of a row, or with exchanged arguments for its momentum buffers: product, product,
 * sum, each rounded. Returns whether the result is finite. */
static int correct(float own_share, const packed_float *restrict own, float others_share,
                   const packed_float *restrict other, Py_ssize_t dim, packed_float *restrict out)
{
    uint32_t beyond = 0;
    for (Py_ssize_t j = 0; j < dim; j++) {
        float by_other = others_share * other[j], corrected = own[j] * own_share + by_other;
        out[j] = corrected;
        beyond |= beyond_finite(corrected);
    }
    return !(beyond >> 31);
}

/* ---- answers of fetches */

typedef struct {
    const packed_float *coefficients; /* [n, 2, 2]; NULL: rows stay as they are */
    long long step;
    unsigned char *weight, *momentum; /* where to write them; momentum may be NULL */
} Answer;

/* Returns whether the row is finite. */
static int answer_row(const Places *p, const Answer *answer, Py_ssize_t i, uint64_t row, const unsigned char *weight,
                      const unsigned char *momentum)
{
    Py_ssize_t dim = p->dim;
    unsigned char *weight_out = answer->weight + i * p->row_bytes;
    unsigned char *momentum_out = answer->momentum == NULL ? NULL : answer->momentum + i * p->row_bytes;
    if (answer->coefficients == NULL) {
        memcpy(weight_out, weight, p->row_bytes);
        if (momentum_out != NULL)
            memcpy(momentum_out, momentum, p->row_bytes);
        return 1;
    }
    const packed_float *c = answer->coefficients + 4 * i, *w = (const packed_float *)weight;
    const packed_float *u = (const packed_float *)momentum;
    if (p->value_bytes == 4)
        return correct(c[0], w, c[1], u, dim, (packed_float *)weight_out)
               && (momentum_out == NULL || correct(c[3], u, c[2], w, dim, (packed_float *)momentum_out));
    packed_float *wide_w = p->scratch, *wide_u = wide_w + dim, *w_out = wide_u + dim, *u_out = w_out + dim;
    widen(weight, dim, wide_w);
    widen(momentum, dim, wide_u);
    if (!correct(c[0], wide_w, c[1], wide_u, dim, w_out)
        || (momentum_out != NULL && !correct(c[3], wide_u, c[2], wide_w, dim, u_out)))
        return 0;
    round_row(p, row, answer->step, WEIGHT, w_out, (packed_u16 *)weight_out);
    if (momentum_out != NULL)
        round_row(p, row, answer->step, MOMENTUM_BUFFER, u_out, (packed_u16 *)momentum_out);
    return 1;
}

/* Returns whether all rows are finite; `initial` is room for two rows, the second one zero. */
static int fill_answer(const Places *p, const Answer *answer, unsigned char *initial)
{
    for (Py_ssize_t b = 0; b < p->num_blocks; b++) {
        const unsigned char *bytes = p->blocks[b].buf;
        for (Py_ssize_t i = p->start[b]; i < p->start[b + 1]; i++) {
            uint64_t row = (uint64_t)p->number[b] * (uint64_t)p->rows + (uint64_t)p->slot[i];
            const unsigned char *weight = initial, *momentum = initial + p->row_bytes;
            if (p->blocks[b].obj != NULL) {
                weight = bytes + p->weight_at + p->slot[i] * p->row_bytes;
                momentum = bytes + p->momentum_at + p->slot[i] * p->row_bytes;
            } else {
                draw_row(p, row, initial);
            }
            if (!answer_row(p, answer, i, row, weight, momentum))
                return 0;
        }
    }
    return 1;
}

static PyObject *answer(PyObject *module, PyObject *args)
{
    (void)module;
    Places p;
    Answer made = {0};
    Py_buffer coefficients, last_step;
    const char *heads[3];
    Py_ssize_t head_bytes[3];
    if (!PyArg_ParseTuple(args, "O&z*L(y#z#z#)y*", take_places, &p, &coefficients, &made.step, &heads[0],
                          &head_bytes[0], &heads[1], &head_bytes[1], &heads[2], &head_bytes[2], &last_step))
        return NULL;
    PyObject *result = NULL;
    unsigned char *initial = PyMem_Calloc(2, p.row_bytes);
    Py_ssize_t sizes[3] = {p.num_rows * p.row_bytes, p.num_rows * p.row_bytes, 8 * p.num_rows}, total = 0;
    unsigned char *parts[3] = {NULL, NULL, NULL};
    if (initial == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    for (Py_ssize_t b = 0; b < p.num_blocks; b++)
        if (p.blocks[b].obj != NULL && !has_items(&p.blocks[b], p.num_bytes, 1, "a block"))
            goto end;
    if ((coefficients.obj != NULL && !has_items(&coefficients, 4 * p.num_rows, 4, "coefficients"))
        || !has_items(&last_step, p.num_rows, 8, "last_step"))
        goto end;
    for (int i = 0; i < 3; i++)
        total += heads[i] == NULL ? 0 : head_bytes[i] + sizes[i];
    result = PyBytes_FromStringAndSize(NULL, total);
    if (result == NULL)
        goto end;
    unsigned char *next = (unsigned char *)PyBytes_AsString(result);
    for (int i = 0; i < 3; i++)
        if (heads[i] != NULL) {
            memcpy(next, heads[i], head_bytes[i]);
            parts[i] = next + head_bytes[i];
            next = parts[i] + sizes[i];
        }
    made.coefficients = coefficients.buf;
    made.weight = parts[0];
    made.momentum = parts[1];
    if (parts[2] != NULL)
        memcpy(parts[2], last_step.buf, sizes[2]);
    int is_finite;
    Py_BEGIN_ALLOW_THREADS
    is_finite = fill_answer(&p, &made, initial);
    Py_END_ALLOW_THREADS
    if (!is_finite) {
        Py_DECREF(result);
        result = Py_NewRef(Py_None);
    }
end:
    PyMem_Free(initial);
    PyBuffer_Release(&coefficients);
    PyBuffer_Release(&last_step);
    release_places(&p);
    return result;
}

/* ---- blocks as a write changes them */

typedef struct {
    unsigned long long write_id;
    Py_buffer given[3]; /* gradients, coefficients or nothing, nothing; or weights, momentum buffers and last steps */
    float weight_decay, momentum, learning_rate;
    long long step; /* -1 if rows are replaced */
} Update;

/* correction.apply_push for one row: torch.optim.SGD, product by product. Returns whether the result is finite. */
static int take_step(const Update *update, const packed_float *restrict gradient, Py_ssize_t dim,
                     const packed_float *before_w, const packed_float *before_u, packed_float *weight,
                     packed_float *momentum)
{
    float weight_decay = update->weight_decay, momentum_factor = update->momentum, rate = update->learning_rate;
    uint32_t beyond = 0;
    INDEPENDENT /* each value is read before it is written, in the same place or in another */
    for (Py_ssize_t j = 0; j < dim; j++) {
        float w = before_w[j], u = before_u[j];
        float change = w * weight_decay;
        change += gradient[j];
        u *= momentum_factor;
        u += change;
        float moved = u * rate;
        w -= moved;
        weight[j] = w;
        momentum[j] = u;
        beyond |= beyond_finite(w) | beyond_finite(u);
    }
    return !(beyond >> 31);
}

/* Applies gradient i to a row, corrected first if it has missed updates; returns whether the result is finite. */
static int push_row(const Places *p, const Update *update, Py_ssize_t i, uint64_t row, unsigned char *weight,
                    unsigned char *momentum)
{
    Py_ssize_t dim = p->dim;
    const unsigned char *given = (const unsigned char *)update->given[0].buf + i * p->row_bytes;
    const packed_float *c = update->given[1].buf, *gradient = (const packed_float *)given;
    packed_float *w = (packed_float *)weight, *u = (packed_float *)momentum, *next = p->scratch;
    if (p->value_bytes == 2) {
        widen(given, dim, next);
        gradient = next;
        w = next + dim;
        u = w + dim;
        widen(weight, dim, w);
        widen(momentum, dim, u);
        next = u + dim;
    }
    const packed_float *before_w = w, *before_u = u;
    if (c != NULL) {
        correct(c[4 * i], w, c[4 * i + 1], u, dim, next);
        correct(c[4 * i + 3], u, c[4 * i + 2], w, dim, next + dim);
        before_w = next;
        before_u = next + dim;
    }
    if (!take_step(update, gradient, dim, before_w, before_u, w, u))
        return 0;
    if (p->value_bytes == 2) {
        round_row(p, row, update->step + 1, WEIGHT, w, (packed_u16 *)weight);
        round_row(p, row, update->step + 1, MOMENTUM_BUFFER, u, (packed_u16 *)momentum);
    }
    return 1;
}

/* Writes the header and the checksums of the groups of some slots, as in `is_sound`. */
static void seal(const Places *p, uint64_t number, uint64_t write_id, const packed_i64 *slots, Py_ssize_t i,
                 Py_ssize_t end, unsigned char *out)
{
    packed_u64 *of_groups = (packed_u64 *)(out + p->groups_at);
    for (Py_ssize_t group, known = -1; i < end; i++, known = group) {
        group = (slots == NULL ? i : slots[i]) / p->group_rows;
        if (group != known)
            of_groups[group] = checksum_of_group(p, out, number, group);
    }
    write_start(p, out);
    uint64_t checksum = checksum_of_root(p, out, number, write_id);
    memcpy(out + CHECKSUM_AT, &checksum, 8);
}

/* Copies block b, checks it, changes its rows and seals it; returns how many of them were never written before, or -1
 * if the block is damaged or a row becomes infinite or NaN. */
static Py_ssize_t change_block(const Places *p, const Update *update, Py_ssize_t b, unsigned char *out)
{
    uint64_t number = (uint64_t)p->number[b], first = number * (uint64_t)p->rows;
    int is_new = p->blocks[b].obj == NULL;
    if (is_new) {
        memset(out, 0, p->num_bytes);
        for (Py_ssize_t slot = 0; slot < p->rows; slot++)
            draw_row(p, first + (uint64_t)slot, out + p->weight_at + slot * p->row_bytes);
    } else {
        if (p->blocks[b].len != p->num_bytes)
            return -1;
        memcpy(out, p->blocks[b].buf, p->num_bytes); /* checked are the bytes that will be stored */
        if (!is_sound(p, b, out, NULL, 0, p->rows))
            return -1;
    }
    Py_ssize_t added = 0;
    packed_i64 *steps = (packed_i64 *)(out + p->last_step_at);
    for (Py_ssize_t i = p->start[b]; i < p->start[b + 1]; i++) {
        int64_t slot = p->slot[i];
        unsigned char *weight = out + p->weight_at + slot * p->row_bytes;
        unsigned char *momentum = out + p->momentum_at + slot * p->row_bytes;
        if (update->step >= 0) {
            if (!push_row(p, update, i, first + (uint64_t)slot, weight, momentum))
                return -1;
            steps[slot] = update->step + 1;
        } else {
            memcpy(weight, (const char *)update->given[0].buf + i * p->row_bytes, p->row_bytes);
            memcpy(momentum, (const char *)update->given[1].buf + i * p->row_bytes, p->row_bytes);
            steps[slot] = ((const packed_i64 *)update->given[2].buf)[i];
        }
        unsigned char *written = out + HEADER_BYTES + slot / 8, bit = (unsigned char)(1 << slot % 8);
        added += !(*written & bit);
        *written |= bit;
    }
    if (is_new)
        seal(p, number, update->write_id, NULL, 0, p->rows, out);
    else
        seal(p, number, update->write_id, p->slot, p->start[b], p->start[b + 1], out);
    return added;
}

static int take_update(PyObject *object, const Places *p, Update *update)
{
    Py_buffer *given = update->given;
    Py_ssize_t num_values = p->num_rows * p->dim;
    if (PyTuple_Size(object) == 3) {
        update->step = -1;
        return PyArg_ParseTuple(object, "y*y*y*", &given[0], &given[1], &given[2])
               && has_items(&given[0], num_values, p->value_bytes, "weight")
               && has_items(&given[1], num_values, p->value_bytes, "momentum_buffer")
               && has_items(&given[2], p->num_rows, 8, "last_step");
    }
    if (!PyArg_ParseTuple(object, "y*z*(fff)L", &given[0], &given[1], &update->weight_decay, &update->momentum,
                          &update->learning_rate, &update->step))
        return 0;
    if (update->step < 0 || update->step == LLONG_MAX) {
        PyErr_SetString(PyExc_ValueError, "there is no such step");
        return 0;
    }
    return has_items(&given[0], num_values, p->value_bytes, "gradients")
           && (given[1].obj == NULL || has_items(&given[1], 4 * p->num_rows, 4, "coefficients"));
}

static PyObject *change(PyObject *module, PyObject *args)
{
    (void)module;
    Places p;
    Update update = {0};
    Py_buffer room;
    PyObject *object, *result = NULL;
    if (!PyArg_ParseTuple(args, "O&Kw*O!", take_places, &p, &update.write_id, &room, &PyTuple_Type, &object))
        return NULL;
    if (room.len / p.num_bytes < p.num_blocks) {
        PyErr_SetString(PyExc_ValueError, "there is not enough room for the blocks");
    } else if (take_update(object, &p, &update)) {
        Py_ssize_t added = 0;
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t b = 0; b < p.num_blocks && added >= 0; b++) {
            Py_ssize_t more = change_block(&p, &update, b, (unsigned char *)room.buf + b * p.num_bytes);
            added = more < 0 ? -1 : added + more;
        }
        Py_END_ALLOW_THREADS
        result = PyLong_FromSsize_t(added);
    }
    for (int i = 0; i < 3; i++)
        PyBuffer_Release(&update.given[i]);
    PyBuffer_Release(&room);
    release_places(&p);
    return result;
}

static PyMethodDef methods[] = {
    {"look", look, METH_VARARGS, NULL},
    {"answer", answer, METH_VARARGS, NULL},
    {"change", change, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int fill_module(PyObject *module)
{
    return PyModule_AddIntConstant(module, "INTERFACE", INTERFACE);
}

static PyModuleDef_Slot slots_of_module[] = {{Py_mod_exec, fill_module}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_kernel", .m_methods = methods, .m_slots = slots_of_module};

PyMODINIT_FUNC PyInit__kernel(void)
{
    return PyModuleDef_Init(&definition);
}
