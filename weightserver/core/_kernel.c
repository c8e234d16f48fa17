/* The inner passes over rows, without the GIL: see kernel.py, which chooses between this and NumPy.
 *
 * Every function computes the bits of NumPy's definition in correction.py, initial.py and precision.py: IEEE float32,
 * each product and sum rounded by itself, in this order.
 *
 * Buffers come from the network and from files. Their lengths are compared with what the arguments say before anything
 * is read, and a slot or an index that lies outside is an error; no number in a buffer is trusted. Stored values need
 * not be aligned.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <float.h>
#include <limits.h>
#include <math.h>
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
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "blocks and messages are little-endian"
#endif

/* A change of any function's arguments or results; kernel.py takes no other. */
#define INTERFACE 6

typedef float __attribute__((aligned(1), may_alias)) packed_float;
typedef uint16_t __attribute__((aligned(1), may_alias)) packed_u16;
typedef uint32_t __attribute__((aligned(1), may_alias)) packed_u32;
typedef int64_t __attribute__((aligned(1), may_alias)) packed_i64;
typedef uint64_t __attribute__((aligned(1), may_alias)) packed_u64;

/* ---- random bits: see splitmix.py. Seeds are mixed already. */

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

/* ---- blocks: see blocks.py */

enum { HEADER_BYTES = 16, START_BYTES = 8 };
typedef uint64_t (*checksum_function)(const void *, size_t, uint64_t); /* XXH3_64bits_withSeed */

typedef struct {
    Py_ssize_t rows, dim, value_bytes, group_rows, last_step_at, weight_at, momentum_at, groups_at, num_bytes;
} Layout;

static Py_ssize_t num_groups(const Layout *layout)
{
    return (layout->rows - 1) / layout->group_rows + 1;
}

static int parse_layout(PyObject *object, void *out)
{
    Layout *layout = out;
    if (!PyArg_ParseTuple(object, "nnnnnnnnn", &layout->rows, &layout->dim, &layout->value_bytes,
                          &layout->group_rows, &layout->last_step_at, &layout->weight_at, &layout->momentum_at,
                          &layout->groups_at, &layout->num_bytes))
        return 0;
    Py_ssize_t values = layout->value_bytes * layout->dim;
    int sound = layout->rows > 0 && layout->rows < 1 << 16 && layout->dim > 0 && layout->dim < 1 << 24
                && (layout->value_bytes == 2 || layout->value_bytes == 4) && layout->group_rows > 0
                && layout->last_step_at >= HEADER_BYTES + (layout->rows + 7) / 8
                && layout->weight_at >= layout->last_step_at + 8 * layout->rows
                && layout->momentum_at >= layout->weight_at + values * layout->rows
                && layout->groups_at >= layout->momentum_at + values * layout->rows
                && layout->num_bytes >= layout->groups_at + 8 * num_groups(layout);
    if (!sound)
        PyErr_SetString(PyExc_ValueError, "the layout of a block is inconsistent");
    return sound;
}

/* Arrays of int64, float32, ...: contiguous, and of exactly `count` items. */
static int get_array(PyObject *object, Py_buffer *view, Py_ssize_t count, Py_ssize_t item_bytes, int writable,
                     const char *name)
{
    if (PyObject_GetBuffer(object, view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        return -1;
    if (count >= 0 && view->len / item_bytes == count && view->len % item_bytes == 0)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s has %zd bytes, not %zd items of %zd", name, view->len, count, item_bytes);
    PyBuffer_Release(view);
    return -1;
}

/* The blocks that rows lie in, and where. */
typedef struct {
    Layout layout;
    Py_ssize_t num_rows, num_blocks, held;
    Py_buffer *blocks; /* `obj` is NULL for one that was never written */
    Py_buffer starts, slots;
} Touched;

static void release_touched(Touched *touched)
{
    for (Py_ssize_t i = 0; i < touched->held; i++)
        if (touched->blocks[i].obj != NULL)
            PyBuffer_Release(&touched->blocks[i]);
    PyMem_Free(touched->blocks);
    if (touched->starts.obj != NULL)
        PyBuffer_Release(&touched->starts);
    if (touched->slots.obj != NULL)
        PyBuffer_Release(&touched->slots);
}

/* The rows of block b are number starts[b] to starts[b+1] of all, and lie in these slots of it. */
static int check_places(const Touched *touched)
{
    const packed_i64 *starts = touched->starts.buf, *slots = touched->slots.buf;
    if (starts[0] != 0 || starts[touched->num_blocks] != touched->num_rows)
        return -1;
    for (Py_ssize_t b = 0; b < touched->num_blocks; b++)
        if (starts[b] > starts[b + 1])
            return -1;
    uint64_t rows = (uint64_t)touched->layout.rows;
    int outside = 0;
    for (Py_ssize_t i = 0; i < touched->num_rows; i++)
        outside |= (uint64_t)slots[i] >= rows;
    return outside ? -1 : 0;
}

static int get_touched(Touched *touched, PyObject *layout, PyObject *blocks, PyObject *starts, PyObject *slots)
{
    memset(touched, 0, sizeof *touched);
    if (!parse_layout(layout, &touched->layout))
        return -1;
    if (!PyList_Check(blocks)) {
        PyErr_SetString(PyExc_TypeError, "blocks must be a list");
        return -1;
    }
    touched->num_blocks = PyList_Size(blocks);
    touched->blocks = PyMem_Calloc(touched->num_blocks + 1, sizeof *touched->blocks);
    if (touched->blocks == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (get_array(starts, &touched->starts, touched->num_blocks + 1, 8, 0, "starts") < 0)
        goto fail;
    if (PyObject_GetBuffer(slots, &touched->slots, PyBUF_SIMPLE) < 0)
        goto fail;
    touched->num_rows = touched->slots.len / 8;
    for (Py_ssize_t b = 0; b < touched->num_blocks; b++) {
        PyObject *block = PyList_GetItem(blocks, b);
        if (block == NULL)
            goto fail;
        if (block != Py_None && PyObject_GetBuffer(block, &touched->blocks[b], PyBUF_SIMPLE) < 0)
            goto fail;
        touched->held = b + 1;
    }
    if (check_places(touched) < 0) {
        PyErr_SetString(PyExc_ValueError, "a row lies outside its block");
        goto fail;
    }
    return 0;
fail:
    release_touched(touched);
    return -1;
}

static uint64_t checksum_of_root(const Layout *layout, const unsigned char *bytes, uint64_t number, uint64_t write_id,
                                 checksum_function checksum)
{
    uint64_t seed = mixed(mixed(number) ^ write_id);
    seed = checksum(bytes + HEADER_BYTES, (size_t)(layout->weight_at - HEADER_BYTES), seed);
    return checksum(bytes + layout->groups_at, (size_t)(8 * num_groups(layout)), seed);
}

static uint64_t checksum_of_group(const Layout *layout, const unsigned char *bytes, uint64_t number, Py_ssize_t group,
                                  checksum_function checksum)
{
    Py_ssize_t first = group * layout->group_rows, left = layout->rows - first;
    Py_ssize_t row_bytes = layout->dim * layout->value_bytes;
    size_t size = (size_t)((left < layout->group_rows ? left : layout->group_rows) * row_bytes);
    uint64_t seed = checksum(bytes + layout->weight_at + first * row_bytes, size, (number << 16) + (uint64_t)group);
    return checksum(bytes + layout->momentum_at + first * row_bytes, size, seed);
}

/* Whether a block is as that write left it, as far as the rows in these slots depend on it, or the first num_slots if
 * there are none; without checksums, has the right length. */
static int is_sound(const Layout *layout, const unsigned char *bytes, Py_ssize_t num_bytes, uint64_t number,
                    uint64_t write_id, const packed_i64 *slots, Py_ssize_t num_slots, checksum_function checksum)
{
    if (num_bytes != layout->num_bytes)
        return 0;
    if (checksum == NULL)
        return 1;
    uint16_t value_bytes, rows;
    uint32_t dim;
    uint64_t stored;
    memcpy(&value_bytes, bytes, 2);
    memcpy(&rows, bytes + 2, 2);
    memcpy(&dim, bytes + 4, 4);
    memcpy(&stored, bytes + START_BYTES, 8);
    if (value_bytes != layout->value_bytes || rows != layout->rows || dim != (uint64_t)layout->dim)
        return 0;
    if (checksum_of_root(layout, bytes, number, write_id, checksum) != stored)
        return 0;
    const packed_u64 *of_groups = (const packed_u64 *)(bytes + layout->groups_at);
    Py_ssize_t known = -1;
    for (Py_ssize_t i = 0; i < num_slots; i++) {
        Py_ssize_t group = (slots == NULL ? i : slots[i]) / layout->group_rows;
        if (group != known && checksum_of_group(layout, bytes, number, group, checksum) != of_groups[group])
            return 0;
        known = group;
    }
    return 1;
}

/* Checks blocks, and reads when their rows were last updated. */
static PyObject *look(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *layout, *blocks, *numbers, *write_ids, *starts, *slots, *last_step;
    unsigned long long checksum_address;
    if (!PyArg_ParseTuple(args, "OOOOOOOK", &layout, &blocks, &numbers, &write_ids, &starts, &slots, &last_step,
                          &checksum_address))
        return NULL;
    Touched touched;
    if (get_touched(&touched, layout, blocks, starts, slots) < 0)
        return NULL;
    Py_buffer number = {0}, write_id = {0}, seen = {0};
    PyObject *result = NULL;
    if (get_array(numbers, &number, touched.num_blocks, 8, 0, "numbers") < 0
        || get_array(write_ids, &write_id, touched.num_blocks, 8, 0, "write_ids") < 0
        || get_array(last_step, &seen, touched.num_rows, 8, 1, "last_step") < 0)
        goto end;
    Py_ssize_t bad = -1;
    Py_BEGIN_ALLOW_THREADS
    checksum_function checksum = (checksum_function)(uintptr_t)checksum_address;
    const packed_i64 *start = touched.starts.buf, *slot = touched.slots.buf, *names = number.buf;
    const packed_u64 *writes = write_id.buf;
    packed_i64 *out = seen.buf;
    for (Py_ssize_t b = 0; b < touched.num_blocks; b++) {
        const Py_buffer *block = &touched.blocks[b];
        if (block->obj == NULL) {
            for (Py_ssize_t i = start[b]; i < start[b + 1]; i++)
                out[i] = 0;
            continue;
        }
        Py_ssize_t num_slots = start[b + 1] - start[b];
        if (!is_sound(&touched.layout, block->buf, block->len, (uint64_t)names[b], writes[b], slot + start[b],
                      num_slots, checksum)) {
            bad = b;
            break;
        }
        const unsigned char *bytes = block->buf;
        const packed_i64 *steps = (const packed_i64 *)(bytes + touched.layout.last_step_at);
        for (Py_ssize_t i = start[b]; i < start[b + 1]; i++)
            out[i] = steps[slot[i]];
    }
    Py_END_ALLOW_THREADS
    result = PyLong_FromSsize_t(bad);
end:
    if (number.obj != NULL)
        PyBuffer_Release(&number);
    if (write_id.obj != NULL)
        PyBuffer_Release(&write_id);
    if (seen.obj != NULL)
        PyBuffer_Release(&seen);
    release_touched(&touched);
    return result;
}

/* ---- initial rows: see initial.py */

typedef struct {
    unsigned long long seed;
    float std;
    Py_buffer quantiles; /* float32 [65536] */
} Initial;

static int get_initial(PyObject *object, Initial *initial)
{
    PyObject *quantiles;
    double std;
    if (!PyArg_ParseTuple(object, "KdO", &initial->seed, &std, &quantiles))
        return -1;
    initial->std = (float)std;
    return get_array(quantiles, &initial->quantiles, 65536, 4, 0, "quantiles");
}

static void initial_row(const Initial *initial, int64_t row, Py_ssize_t dim, packed_float *restrict out)
{
    const packed_float *quantiles = initial->quantiles.buf;
    uint64_t words = (uint64_t)(dim + 1) / 2, first = (uint64_t)row * words;
    for (Py_ssize_t j = 0; j + 1 < dim; j += 2) {
        uint64_t z = splitmix64(initial->seed, first + (uint64_t)j / 2);
        out[j] = (quantiles[z & 0xFFFF] + quantiles[z >> 16 & 0xFFFF]) * initial->std;
        out[j + 1] = (quantiles[z >> 32 & 0xFFFF] + quantiles[z >> 48]) * initial->std;
    }
    if (dim % 2) {
        uint64_t z = splitmix64(initial->seed, first + words - 1);
        out[dim - 1] = (quantiles[z & 0xFFFF] + quantiles[z >> 16 & 0xFFFF]) * initial->std;
    }
}

static PyObject *initial_rows(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *source, *rows, *out;
    Py_ssize_t dim;
    Initial initial;
    if (!PyArg_ParseTuple(args, "OOnO", &source, &rows, &dim, &out))
        return NULL;
    if (get_initial(source, &initial) < 0)
        return NULL;
    Py_buffer row, weight;
    PyObject *result = NULL;
    if (PyObject_GetBuffer(rows, &row, PyBUF_SIMPLE) < 0)
        goto end;
    Py_ssize_t num_rows = row.len / 8;
    if (dim < 1 || dim >= 1 << 24 || num_rows > PY_SSIZE_T_MAX / 4 / dim) {
        PyErr_SetString(PyExc_ValueError, "too many values");
    } else if (get_array(out, &weight, num_rows * dim, 4, 1, "weight") == 0) {
        Py_BEGIN_ALLOW_THREADS
        const packed_i64 *names = row.buf;
        for (Py_ssize_t i = 0; i < num_rows; i++)
            initial_row(&initial, names[i], dim, (packed_float *)weight.buf + i * dim);
        Py_END_ALLOW_THREADS
        PyBuffer_Release(&weight);
        result = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&row);
end:
    PyBuffer_Release(&initial.quantiles);
    return result;
}

/* ---- the stored numbers: see precision.py */

enum { WEIGHT, MOMENTUM_BUFFER };
typedef struct {
    unsigned long long seed;
    long long step;
} Rounding;

static void widen(const packed_u16 *restrict stored, Py_ssize_t dim, packed_float *restrict out)
{
    for (Py_ssize_t j = 0; j < dim; j++) {
        uint32_t bits = (uint32_t)stored[j] << 16;
        memcpy(out + j, &bits, 4);
    }
}

static void round_row(uint64_t seed, int64_t row, int64_t step, int array, const packed_float *restrict values,
                      Py_ssize_t dim, packed_u16 *restrict out)
{
    const uint32_t largest_bits = 0x7F7F0000;
    float largest;
    memcpy(&largest, &largest_bits, 4);
    uint64_t words = (uint64_t)(dim + 3) / 4;
    uint64_t stream = splitmix64(seed, splitmix64(seed, (uint64_t)row) + (uint64_t)step) + (uint64_t)array * words;
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

/* The uppermost bit is set if the value is infinite or NaN: the greatest finite number has the greatest bits but for the
 * sign. Combined by |, it tells so of many values. */
static inline uint32_t beyond_finite(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return UINT32_C(0x7F7FFFFF) - (bits & 0x7FFFFFFF);
}

/* ---- rows as a fetch answers them */

typedef struct {
    float ww, wu, uw, uu;
} Coefficients;

/* correction.correct for one row: product, product, sum, each rounded. Returns whether the result is finite. */
static int correct_weight(Coefficients c, const packed_float *restrict w, const packed_float *restrict u,
                           Py_ssize_t dim, packed_float *restrict weight)
{
    uint32_t beyond = 0;
    for (Py_ssize_t j = 0; j < dim; j++) {
        float by_momentum = c.wu * u[j], corrected = w[j] * c.ww + by_momentum;
        weight[j] = corrected;
        beyond |= beyond_finite(corrected);
    }
    return !(beyond >> 31);
}

static int correct_momentum(Coefficients c, const packed_float *restrict w, const packed_float *restrict u,
                             Py_ssize_t dim, packed_float *restrict momentum)
{
    uint32_t beyond = 0;
    for (Py_ssize_t j = 0; j < dim; j++) {
        float by_weight = c.uw * w[j], corrected = u[j] * c.uu + by_weight;
        momentum[j] = corrected;
        beyond |= beyond_finite(corrected);
    }
    return !(beyond >> 31);
}

typedef struct {
    const Touched *touched;
    const packed_i64 *rows;
    const packed_float *coefficients; /* NULL: rows stay as they are */
    Initial initial;
    Rounding rounding;
    unsigned char *weight, *momentum; /* momentum may be NULL */
    float *scratch;                   /* 4 rows */
} Answer;

/* Returns whether the row is finite. */
static int answer_row(const Answer *answer, Py_ssize_t i, const unsigned char *weight, const unsigned char *momentum)
{
    const Layout *layout = &answer->touched->layout;
    Py_ssize_t dim = layout->dim, row_bytes = layout->value_bytes * dim;
    unsigned char *weight_out = answer->weight + i * row_bytes;
    unsigned char *momentum_out = answer->momentum == NULL ? NULL : answer->momentum + i * row_bytes;
    int is_bfloat16 = layout->value_bytes == 2;
    if (answer->coefficients == NULL) {
        memcpy(weight_out, weight, row_bytes);
        if (momentum_out != NULL)
            memcpy(momentum_out, momentum, row_bytes);
        return 1;
    }
    const packed_float *four = answer->coefficients + 4 * i;
    Coefficients c = {four[0], four[1], four[2], four[3]};
    if (!is_bfloat16) {
        const packed_float *w = (const packed_float *)weight, *u = (const packed_float *)momentum;
        return correct_weight(c, w, u, dim, (packed_float *)weight_out)
               && (momentum_out == NULL || correct_momentum(c, w, u, dim, (packed_float *)momentum_out));
    }
    const Rounding *rounding = &answer->rounding;
    packed_float *w = answer->scratch, *u = w + dim, *w_out = u + dim, *u_out = w_out + dim;
    widen((const packed_u16 *)weight, dim, w);
    widen((const packed_u16 *)momentum, dim, u);
    if (!correct_weight(c, w, u, dim, w_out) || (momentum_out != NULL && !correct_momentum(c, w, u, dim, u_out)))
        return 0;
    round_row(rounding->seed, answer->rows[i], rounding->step, WEIGHT, w_out, dim, (packed_u16 *)weight_out);
    if (momentum_out != NULL)
        round_row(rounding->seed, answer->rows[i], rounding->step, MOMENTUM_BUFFER, u_out, dim,
                  (packed_u16 *)momentum_out);
    return 1;
}

/* Returns whether all rows are finite. */
static int fill_answer(const Answer *answer, unsigned char *initial_weight, const unsigned char *zeros)
{
    const Touched *touched = answer->touched;
    const Layout *layout = &touched->layout;
    Py_ssize_t dim = layout->dim, row_bytes = layout->value_bytes * dim;
    const packed_i64 *start = touched->starts.buf, *slot = touched->slots.buf;
    for (Py_ssize_t b = 0; b < touched->num_blocks; b++) {
        const unsigned char *bytes = touched->blocks[b].buf;
        int is_stored = touched->blocks[b].obj != NULL;
        for (Py_ssize_t i = start[b]; i < start[b + 1]; i++) {
            const unsigned char *weight = initial_weight, *momentum = zeros;
            if (is_stored) {
                weight = bytes + layout->weight_at + slot[i] * row_bytes;
                momentum = bytes + layout->momentum_at + slot[i] * row_bytes;
            } else if (layout->value_bytes == 4) {
                initial_row(&answer->initial, answer->rows[i], dim, (packed_float *)initial_weight);
            } else {
                initial_row(&answer->initial, answer->rows[i], dim, answer->scratch);
                round_row(answer->rounding.seed, answer->rows[i], 0, WEIGHT, answer->scratch, dim,
                          (packed_u16 *)initial_weight);
            }
            if (!answer_row(answer, i, weight, momentum))
                return 0;
        }
    }
    return 1;
}

/* Writes the rows of blocks, corrected, into a new message: each array after its head. None if one is not finite. */
static PyObject *answer(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *layout, *blocks, *starts, *slots, *rows, *coefficients, *initial, *result = NULL;
    const char *heads[3];
    Py_ssize_t head_bytes[3];
    Answer made = {0};
    PyObject *steps;
    if (!PyArg_ParseTuple(args, "OOOOOOO(KL)(z#z#z#)O", &layout, &blocks, &starts, &slots, &rows, &coefficients, &initial,
                          &made.rounding.seed, &made.rounding.step, &heads[0], &head_bytes[0], &heads[1],
                          &head_bytes[1], &heads[2], &head_bytes[2], &steps))
        return NULL;
    Touched touched;
    if (get_touched(&touched, layout, blocks, starts, slots) < 0)
        return NULL;
    made.touched = &touched;
    Py_buffer row = {0}, factor = {0}, last_step = {0};
    unsigned char *own = NULL;
    Py_ssize_t num_rows = touched.num_rows, dim = touched.layout.dim, row_bytes = dim * touched.layout.value_bytes;
    for (Py_ssize_t b = 0; b < touched.num_blocks; b++)
        if (touched.blocks[b].obj != NULL && touched.blocks[b].len != touched.layout.num_bytes) {
            PyErr_SetString(PyExc_ValueError, "a block has another size");
            goto end;
        }
    if (heads[0] == NULL || num_rows > (PY_SSIZE_T_MAX / 4 - 1024) / (row_bytes + 8)) {
        PyErr_SetString(PyExc_ValueError, "too many rows, or no weights");
        goto end;
    }
    if (get_array(rows, &row, num_rows, 8, 0, "rows") < 0)
        goto end;
    if (coefficients != Py_None && get_array(coefficients, &factor, 4 * num_rows, 4, 0, "coefficients") < 0)
        goto end;
    if (heads[2] != NULL && get_array(steps, &last_step, num_rows, 8, 0, "last_step") < 0)
        goto end;
    if (get_initial(initial, &made.initial) < 0)
        goto end;
    own = PyMem_Calloc(4 * dim + 2 * dim, 4); /* scratch, initial weights, zeros */
    if (own == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    Py_ssize_t total = head_bytes[0] + num_rows * row_bytes + (heads[1] ? head_bytes[1] + num_rows * row_bytes : 0)
                       + (heads[2] ? head_bytes[2] + 8 * num_rows : 0);
    result = PyBytes_FromStringAndSize(NULL, total);
    if (result == NULL)
        goto end;
    unsigned char *next = (unsigned char *)PyBytes_AsString(result);
    made.rows = row.buf;
    made.coefficients = coefficients == Py_None ? NULL : factor.buf;
    made.scratch = (float *)own;
    memcpy(next, heads[0], head_bytes[0]);
    made.weight = next + head_bytes[0];
    next = made.weight + num_rows * row_bytes;
    if (heads[1] != NULL) {
        memcpy(next, heads[1], head_bytes[1]);
        made.momentum = next + head_bytes[1];
        next = made.momentum + num_rows * row_bytes;
    }
    if (heads[2] != NULL) {
        memcpy(next, heads[2], head_bytes[2]);
        memcpy(next + head_bytes[2], last_step.buf, 8 * num_rows);
    }
    int is_finite;
    Py_BEGIN_ALLOW_THREADS
    is_finite = fill_answer(&made, own + 16 * dim, own + 20 * dim);
    Py_END_ALLOW_THREADS
    if (!is_finite) {
        Py_DECREF(result);
        result = Py_NewRef(Py_None);
    }
end:
    PyMem_Free(own);
    if (made.initial.quantiles.obj != NULL)
        PyBuffer_Release(&made.initial.quantiles);
    if (last_step.obj != NULL)
        PyBuffer_Release(&last_step);
    if (factor.obj != NULL)
        PyBuffer_Release(&factor);
    if (row.obj != NULL)
        PyBuffer_Release(&row);
    release_touched(&touched);
    return result;
}

/* ---- blocks as a write changes them */

typedef struct {
    float weight_decay, momentum, learning_rate;
} Rates;

/* correction._apply_on_time for one value: product by product. */
static inline void take_step(Rates rates, float gradient, float *w, float *u)
{
    float change = *w * rates.weight_decay;
    change += gradient;
    *u *= rates.momentum;
    *u += change;
    float moved = *u * rates.learning_rate;
    *w -= moved;
}

/* The same for one row, in place, corrected first if it has missed updates. Returns whether the result is finite. */
static int update_row(Rates rates, const Coefficients *missed, const packed_float *restrict gradient, Py_ssize_t dim,
                       packed_float *restrict weight, packed_float *restrict momentum)
{
    uint32_t beyond = 0;
    if (missed == NULL) {
        for (Py_ssize_t j = 0; j < dim; j++) {
            float w = weight[j], u = momentum[j];
            take_step(rates, gradient[j], &w, &u);
            weight[j] = w;
            momentum[j] = u;
            beyond |= beyond_finite(w) | beyond_finite(u);
        }
        return !(beyond >> 31);
    }
    Coefficients c = *missed;
    for (Py_ssize_t j = 0; j < dim; j++) {
        float by_momentum = c.wu * momentum[j], by_weight = c.uw * weight[j];
        float w = weight[j] * c.ww, u = momentum[j] * c.uu;
        w += by_momentum;
        u += by_weight;
        take_step(rates, gradient[j], &w, &u);
        weight[j] = w;
        momentum[j] = u;
        beyond |= beyond_finite(w) | beyond_finite(u);
    }
    return !(beyond >> 31);
}

typedef struct {
    Touched touched;
    Py_buffer numbers, write_ids, out;
    Initial initial;
    unsigned long long write_id; /* of the changed blocks; write_ids are those of the stored ones */
    unsigned long long seed;     /* of rounding */
    checksum_function checksum;
    float *scratch; /* 3 rows */
    int is_push;
    /* a push: */
    const packed_float *coefficients; /* NULL: the rows have seen all earlier updates */
    const unsigned char *gradients;
    Rates rates;
    /* raw rows: */
    const unsigned char *weight, *momentum;
    const packed_i64 *last_step;
    long long step; /* of a push */
} Change;

static void release_change(Change *change)
{
    PyMem_Free(change->scratch);
    if (change->initial.quantiles.obj != NULL)
        PyBuffer_Release(&change->initial.quantiles);
    if (change->numbers.obj != NULL)
        PyBuffer_Release(&change->numbers);
    if (change->write_ids.obj != NULL)
        PyBuffer_Release(&change->write_ids);
    if (change->out.obj != NULL)
        PyBuffer_Release(&change->out);
    release_touched(&change->touched);
}

static int get_change(PyObject *object, Change *change)
{
    PyObject *layout, *blocks, *numbers, *write_ids, *starts, *slots, *initial, *out;
    unsigned long long checksum_address;
    memset(change, 0, sizeof *change);
    if (!PyArg_ParseTuple(object, "OOOOOOOKKKO", &layout, &blocks, &numbers, &write_ids, &starts, &slots, &initial,
                          &change->write_id, &change->seed, &checksum_address, &out))
        return -1;
    Touched *touched = &change->touched;
    if (get_touched(touched, layout, blocks, starts, slots) < 0)
        return -1;
    change->checksum = (checksum_function)(uintptr_t)checksum_address;
    if (change->checksum == NULL) {
        PyErr_SetString(PyExc_ValueError, "blocks that are stored have checksums");
        goto fail;
    }
    if (get_array(numbers, &change->numbers, touched->num_blocks, 8, 0, "numbers") < 0
        || get_array(write_ids, &change->write_ids, touched->num_blocks, 8, 0, "write_ids") < 0)
        goto fail;
    if (get_initial(initial, &change->initial) < 0)
        goto fail;
    if (PyObject_GetBuffer(out, &change->out, PyBUF_WRITABLE) < 0)
        goto fail;
    if (change->out.len / touched->layout.num_bytes < touched->num_blocks
        || touched->num_rows > PY_SSIZE_T_MAX / 16 / touched->layout.dim) {
        PyErr_SetString(PyExc_ValueError, "too many rows, or not enough room for the blocks");
        goto fail;
    }
    change->scratch = PyMem_Malloc(12 * touched->layout.dim);
    if (change->scratch == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    return 0;
fail:
    release_change(change);
    return -1;
}

static void draw_block(const Change *change, uint64_t number, unsigned char *out)
{
    const Layout *layout = &change->touched.layout;
    memset(out, 0, layout->num_bytes);
    for (Py_ssize_t slot = 0; slot < layout->rows; slot++) {
        int64_t row = (int64_t)(number * (uint64_t)layout->rows + (uint64_t)slot);
        unsigned char *weight = out + layout->weight_at + slot * layout->dim * layout->value_bytes;
        if (layout->value_bytes == 4) {
            initial_row(&change->initial, row, layout->dim, (packed_float *)weight);
        } else {
            initial_row(&change->initial, row, layout->dim, change->scratch);
            round_row(change->seed, row, 0, WEIGHT, change->scratch, layout->dim, (packed_u16 *)weight);
        }
    }
}

/* Applies gradient i to a row; returns whether the result is finite. */
static int push_row(const Change *change, Py_ssize_t i, int64_t row, unsigned char *weight, unsigned char *momentum)
{
    const Layout *layout = &change->touched.layout;
    Py_ssize_t dim = layout->dim;
    const unsigned char *given = change->gradients + i * dim * layout->value_bytes;
    packed_float *w = (packed_float *)weight, *u = (packed_float *)momentum, *g = change->scratch;
    const packed_float *gradient = (const packed_float *)given;
    if (layout->value_bytes == 2) {
        w = g + dim;
        u = w + dim;
        widen((const packed_u16 *)weight, dim, w);
        widen((const packed_u16 *)momentum, dim, u);
        widen((const packed_u16 *)given, dim, g);
        gradient = g;
    }
    Coefficients missed;
    if (change->coefficients != NULL)
        memcpy(&missed, change->coefficients + 4 * i, sizeof missed);
    if (!update_row(change->rates, change->coefficients == NULL ? NULL : &missed, gradient, dim, w, u))
        return 0;
    if (layout->value_bytes == 2) {
        round_row(change->seed, row, change->step + 1, WEIGHT, w, dim, (packed_u16 *)weight);
        round_row(change->seed, row, change->step + 1, MOMENTUM_BUFFER, u, dim, (packed_u16 *)momentum);
    }
    return 1;
}

static void seal_group(const Change *change, uint64_t number, Py_ssize_t group, unsigned char *out)
{
    const Layout *layout = &change->touched.layout;
    packed_u64 *of_groups = (packed_u64 *)(out + layout->groups_at);
    of_groups[group] = checksum_of_group(layout, out, number, group, change->checksum);
}

static void seal_root(const Change *change, uint64_t number, unsigned char *out)
{
    const Layout *layout = &change->touched.layout;
    uint16_t value_bytes = (uint16_t)layout->value_bytes, rows = (uint16_t)layout->rows;
    uint32_t dim = (uint32_t)layout->dim;
    memcpy(out, &value_bytes, 2);
    memcpy(out + 2, &rows, 2);
    memcpy(out + 4, &dim, 4);
    uint64_t checksum = checksum_of_root(layout, out, number, change->write_id, change->checksum);
    memcpy(out + START_BYTES, &checksum, 8);
}

/* Copies block b, checks it, changes its rows and seals it; returns how many of them were never written before, or -1
 * if the block is damaged or a row becomes infinite or NaN. */
static Py_ssize_t change_block(const Change *change, Py_ssize_t b, unsigned char *out)
{
    const Touched *touched = &change->touched;
    const Layout *layout = &touched->layout;
    const packed_i64 *start = touched->starts.buf, *slots = touched->slots.buf, *names = change->numbers.buf;
    uint64_t number = (uint64_t)names[b];
    const Py_buffer *stored = &touched->blocks[b];
    if (stored->obj == NULL) {
        draw_block(change, number, out);
    } else {
        if (stored->len != layout->num_bytes)
            return -1;
        memcpy(out, stored->buf, stored->len); /* checked are the bytes that will be stored */
        uint64_t write_id = ((const packed_u64 *)change->write_ids.buf)[b];
        if (!is_sound(layout, out, stored->len, number, write_id, NULL, layout->rows, change->checksum))
            return -1;
    }
    Py_ssize_t row_bytes = layout->dim * layout->value_bytes, added = 0;
    unsigned char *bitmap = out + HEADER_BYTES;
    packed_i64 *steps = (packed_i64 *)(out + layout->last_step_at);
    for (Py_ssize_t i = start[b]; i < start[b + 1]; i++) {
        int64_t slot = slots[i], row = (int64_t)(number * (uint64_t)layout->rows + (uint64_t)slot);
        unsigned char *weight = out + layout->weight_at + slot * row_bytes;
        unsigned char *momentum = out + layout->momentum_at + slot * row_bytes, bit = (unsigned char)(1 << slot % 8);
        if (change->is_push) {
            if (!push_row(change, i, row, weight, momentum))
                return -1;
            steps[slot] = change->step + 1;
        } else {
            memcpy(weight, change->weight + i * row_bytes, row_bytes);
            memcpy(momentum, change->momentum + i * row_bytes, row_bytes);
            steps[slot] = change->last_step[i];
        }
        added += !(bitmap[slot / 8] & bit);
        bitmap[slot / 8] |= bit;
    }
    if (stored->obj != NULL) {
        Py_ssize_t sealed = -1;
        for (Py_ssize_t i = start[b]; i < start[b + 1]; i++) {
            Py_ssize_t group = slots[i] / layout->group_rows;
            if (group != sealed)
                seal_group(change, number, group, out);
            sealed = group;
        }
    } else {
        for (Py_ssize_t group = 0; group < num_groups(layout); group++)
            seal_group(change, number, group, out);
    }
    seal_root(change, number, out);
    return added;
}

static PyObject *change_blocks(const Change *change)
{
    Py_ssize_t added = 0;
    Py_BEGIN_ALLOW_THREADS
    unsigned char *out = change->out.buf;
    for (Py_ssize_t b = 0; b < change->touched.num_blocks; b++) {
        Py_ssize_t more = change_block(change, b, out + b * change->touched.layout.num_bytes);
        if (more < 0) {
            added = -1;
            break;
        }
        added += more;
    }
    Py_END_ALLOW_THREADS
    return PyLong_FromSsize_t(added);
}

/* Writes blocks, their rows updated by gradients, to a buffer. */
static PyObject *push(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *shared, *coefficients, *gradients, *result = NULL;
    Rates rates;
    long long step;
    if (!PyArg_ParseTuple(args, "OOO(fff)L", &shared, &coefficients, &gradients, &rates.weight_decay, &rates.momentum,
                          &rates.learning_rate, &step))
        return NULL;
    if (step < 0 || step == LLONG_MAX) {
        PyErr_SetString(PyExc_ValueError, "there is no such step");
        return NULL;
    }
    Change change;
    if (get_change(shared, &change) < 0)
        return NULL;
    const Touched *touched = &change.touched;
    Py_buffer factor = {0}, gradient = {0};
    if (coefficients != Py_None && get_array(coefficients, &factor, 4 * touched->num_rows, 4, 0, "coefficients") < 0)
        goto end;
    if (get_array(gradients, &gradient, touched->num_rows * touched->layout.dim, touched->layout.value_bytes, 0,
                  "gradients") < 0)
        goto end;
    change.is_push = 1;
    change.rates = rates;
    change.step = step;
    change.coefficients = coefficients == Py_None ? NULL : factor.buf;
    change.gradients = gradient.buf;
    result = change_blocks(&change);
    PyBuffer_Release(&gradient);
end:
    if (factor.obj != NULL)
        PyBuffer_Release(&factor);
    release_change(&change);
    return result;
}

/* Writes blocks, their rows replaced, to a buffer. */
static PyObject *replace(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *shared, *arrays[3], *result = NULL;
    if (!PyArg_ParseTuple(args, "OOOO", &shared, &arrays[0], &arrays[1], &arrays[2]))
        return NULL;
    Change change;
    if (get_change(shared, &change) < 0)
        return NULL;
    const Touched *touched = &change.touched;
    Py_ssize_t num_values = touched->num_rows * touched->layout.dim, value_bytes = touched->layout.value_bytes;
    Py_buffer weight = {0}, momentum = {0}, last_step = {0};
    if (get_array(arrays[0], &weight, num_values, value_bytes, 0, "weight") == 0
        && get_array(arrays[1], &momentum, num_values, value_bytes, 0, "momentum_buffer") == 0
        && get_array(arrays[2], &last_step, touched->num_rows, 8, 0, "last_step") == 0) {
        change.weight = weight.buf;
        change.momentum = momentum.buf;
        change.last_step = last_step.buf;
        result = change_blocks(&change);
    }
    Py_buffer *views[] = {&weight, &momentum, &last_step};
    for (int i = 0; i < 3; i++)
        if (views[i]->obj != NULL)
            PyBuffer_Release(views[i]);
    release_change(&change);
    return result;
}

static PyMethodDef methods[] = {
    {"look", look, METH_VARARGS, NULL},
    {"answer", answer, METH_VARARGS, NULL},
    {"initial_rows", initial_rows, METH_VARARGS, NULL},
    {"push", push, METH_VARARGS, NULL},
    {"replace", replace, METH_VARARGS, NULL},
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
