/* Transfer products of whole leaves to one step: TransferTables._products_of_leaves in transfer_tables.py, whose bits it
 * computes, for schedules whose products need no clipping on the way. See _kernel.c for what holds for both files.
 *
 * A few leaves are all that a small fetch needs, and NumPy's two hundred calls for them take longer than its rows.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "_exact.h"

enum { LEAF = 16, MAX_LEVELS = 32, PIECES = 4 };
static const int64_t MOST_EXPONENT = INT64_C(1) << 48; /* a sum of 64 of them does not overflow */

typedef struct {
    double entry[2][2];
} Matrix;

/* A schedule; the nodes as in `_Nodes`, entries first, and the identity as the last node. */
typedef struct {
    const float *rates;
    const int64_t *firsts, *exponent;
    const double *high;
    int64_t num_leaves, num_levels, num_nodes;
    double kappa, momentum, limit, pieces[PIECES];
} Schedule;

static const Matrix IDENTITY = {{{1, 0}, {0, 1}}};

static Matrix product_of(Matrix later, Matrix earlier)
{
    Matrix product;
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++) {
            double by_first = later.entry[i][0] * earlier.entry[0][j];
            double by_second = later.entry[i][1] * earlier.entry[1][j];
            product.entry[i][j] = by_first + by_second;
        }
    return product;
}

static Matrix transposed(Matrix matrix)
{
    double corner = matrix.entry[0][1];
    matrix.entry[0][1] = matrix.entry[1][0];
    matrix.entry[1][0] = corner;
    return matrix;
}

static double two_sum(double a, double b, double *error)
{
    double total = a + b, of_b = total - a;
    *error = (a - (total - of_b)) + (b - of_b);
    return total;
}

/* Steps._cosines, the high part of one of the two. */
static double less_parts(double whole, const double *parts)
{
    double low, more, total = two_sum(whole, -parts[0], &low);
    total = two_sum(total, -parts[1], &more);
    double rest = low + more;
    rest = rest - parts[2];
    rest = rest - parts[3];
    return total + rest;
}

/* Steps.rounded */
static Matrix one_step(const Schedule *schedule, float learning_rate)
{
    double rate = learning_rate, parts[PIECES];
    for (int i = 0; i < PIECES; i++) {
        double part = rate * schedule->pieces[i];
        parts[i] = part < schedule->limit ? part : schedule->limit;
    }
    double cosine = less_parts(1, parts), one_more = less_parts(2, parts);
    Matrix step = {{{cosine, rate * -schedule->momentum}, {one_more * schedule->kappa, cosine * schedule->momentum}}};
    return step;
}

/* TransferTables._to_end_of_leaf */
static void to_end_of_leaf(const Schedule *schedule, int64_t leaf, int64_t stop, Matrix products[LEAF])
{
    for (int i = 0; i < LEAF; i++)
        products[i] = leaf * LEAF + i < stop ? one_step(schedule, schedule->rates[leaf * LEAF + i]) : IDENTITY;
    for (int distance = 1; distance < LEAF; distance *= 2)
        for (int i = 0; i + distance < LEAF; i++)
            products[i] = product_of(products[i + distance], products[i]);
}

/* A node (its place on the level is not negative), or the identity if the level does not belong to the path; 0 if there
 * is no such node. */
static int get_node(const Schedule *schedule, int belongs, int level, int64_t place, Matrix *node, int64_t *exponent)
{
    int64_t number = schedule->num_nodes - 1;
    if (belongs) {
        if (level >= schedule->num_levels || schedule->firsts[level] < 0
            || schedule->firsts[level] >= schedule->num_nodes - place)
            return 0;
        number = schedule->firsts[level] + place;
    }
    for (int entry = 0; entry < 4; entry++)
        node->entry[entry / 2][entry % 2] = schedule->high[entry * schedule->num_nodes + number];
    *exponent = schedule->exponent[number];
    return *exponent > -MOST_EXPONENT && *exponent < MOST_EXPONENT;
}

/* Multiplies neighbours, then neighbours of those, and keeps the largest entry in [1/2, 1). */
static void multiply_pairs(Matrix *products, int64_t *exponents, int count)
{
    for (; count > 1; count /= 2)
        for (int i = 0; i < count / 2; i++) {
            Matrix product = product_of(products[2 * i + 1], products[2 * i]);
            double largest = 0;
            for (int entry = 0; entry < 4; entry++)
                largest = fmax(largest, fabs(product.entry[entry / 2][entry % 2]));
            int more;
            frexp(largest, &more);
            for (int entry = 0; entry < 4; entry++)
                product.entry[entry / 2][entry % 2] = ldexp(product.entry[entry / 2][entry % 2], -more);
            products[i] = product;
            exponents[i] = exponents[2 * i + 1] + exponents[2 * i] + more;
        }
}

/* TransferTables._between for one leaf, with 2^k ≥ all levels that differ between leaves; 0 if a node is missing. */
static int between(const Schedule *schedule, int64_t leaf, int64_t last_leaf, int count, Matrix *result,
                   int64_t *exponent)
{
    int highest = 0;
    for (int64_t differing = leaf ^ last_leaf; differing > 1; differing >>= 1)
        highest++;
    int64_t top = last_leaf >> highest << highest, ahead = top - leaf, beyond = last_leaf - top;
    Matrix climb[MAX_LEVELS], descent[MAX_LEVELS];
    int64_t climb_exponent[MAX_LEVELS], descent_exponent[MAX_LEVELS];
    for (int level = 0; level < count; level++) {
        int64_t climbed = (leaf + (ahead & ((INT64_C(1) << level) - 1))) >> level;
        int64_t descended = (last_leaf >> level) - 1;
        if (!get_node(schedule, ahead >> level & 1, level, climbed, &climb[level], &climb_exponent[level])
            || !get_node(schedule, beyond >> level & 1, level, descended, &descent[level], &descent_exponent[level]))
            return 0;
        descent[level] = transposed(descent[level]); /* it is in the opposite order */
    }
    multiply_pairs(climb, climb_exponent, count);
    multiply_pairs(descent, descent_exponent, count);
    *result = product_of(transposed(descent[0]), climb[0]);
    *exponent = climb_exponent[0] + descent_exponent[0];
    return 1;
}

/* The number of levels that NumPy's code looks at for these leaves: a power of two. */
static int levels_of(const int64_t *leaves, Py_ssize_t count, int64_t last_leaf)
{
    int64_t largest = 1;
    for (Py_ssize_t j = 0; j < count && leaves[j] < last_leaf; j++) {
        int64_t leaf = leaves[j] + 1;
        int highest = 0;
        for (int64_t differing = leaf ^ last_leaf; differing > 1; differing >>= 1)
            highest++;
        int64_t top = last_leaf >> highest << highest;
        largest = top - leaf > largest ? top - leaf : largest;
        largest = last_leaf - top > largest ? last_leaf - top : largest;
    }
    int num_levels = 0, count_of_levels = 1;
    for (; largest; largest >>= 1)
        num_levels++;
    while (count_of_levels < num_levels)
        count_of_levels *= 2;
    return count_of_levels;
}

static double clipped(double value, double limit)
{
    value = value < limit ? value : limit;
    return value > -limit ? value : -limit;
}

/* TransferTables._in_u: in (w, u), and not divided by a power of two any more. */
static Matrix in_u(const Schedule *schedule, Matrix product, int64_t exponent)
{
    for (int i = 0; i < 2; i++) {
        double more = schedule->kappa * product.entry[i][1];
        product.entry[i][0] += more;
    }
    for (int j = 0; j < 2; j++) {
        double less = schedule->kappa * product.entry[0][j];
        product.entry[1][j] -= less;
    }
    int power = exponent > INT32_MAX ? INT32_MAX : exponent < INT32_MIN ? INT32_MIN : (int)exponent;
    for (int entry = 0; entry < 4; entry++)
        product.entry[entry / 2][entry % 2] = clipped(ldexp(product.entry[entry / 2][entry % 2], power), DBL_MAX);
    return product;
}

static int fill(const Schedule *schedule, const int64_t *leaves, Py_ssize_t count, int64_t stop, double *products,
                float *coefficients)
{
    int64_t last_leaf = stop / LEAF;
    int levels = levels_of(leaves, count, last_leaf);
    Matrix ends[LEAF], to_stop[LEAF];
    to_end_of_leaf(schedule, last_leaf, stop, to_stop);
    for (Py_ssize_t j = 0; j < count; j++) {
        Matrix rest = IDENTITY; /* in the last leaf, products have reached the stop already */
        int64_t exponent = 0;
        if (leaves[j] < last_leaf) {
            Matrix leaves_between;
            if (!between(schedule, leaves[j] + 1, last_leaf, levels, &leaves_between, &exponent))
                return 0;
            rest = product_of(to_stop[0], leaves_between);
        }
        to_end_of_leaf(schedule, leaves[j], stop, ends);
        for (int i = 0; i < LEAF; i++) {
            Matrix product = in_u(schedule, product_of(rest, ends[i]), exponent);
            for (int entry = 0; entry < 4; entry++, products++, coefficients++) {
                *products = product.entry[entry / 2][entry % 2];
                *coefficients = (float)clipped(*products, FLT_MAX);
            }
        }
    }
    return 1;
}

/* The address of contiguous, aligned items, and their number; NULL after an error. */
static void *items_of(PyObject *array, Py_buffer *view, size_t item_bytes, int writable, Py_ssize_t *count)
{
    if (PyObject_GetBuffer(array, view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        return NULL;
    *count = view->len / (Py_ssize_t)item_bytes;
    if (view->len % (Py_ssize_t)item_bytes == 0 && (uintptr_t)view->buf % item_bytes == 0)
        return view->buf;
    PyErr_SetString(PyExc_ValueError, "an array of the products has other items, or is not aligned");
    return NULL;
}

PyObject *leaf_products(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *arrays[7]; /* rates, firsts, high, exponent, leaves, products, coefficients */
    static const size_t item_bytes[7] = {4, 8, 8, 8, 8, 8, 4};
    Py_buffer views[7] = {{0}};
    void *items[7];
    Py_ssize_t counts[7];
    Schedule schedule;
    long long stop;
    double *pieces = schedule.pieces;
    if (!PyArg_ParseTuple(args, "(OOOO)(dddddd)dOLOO", &arrays[0], &arrays[1], &arrays[2], &arrays[3], &schedule.kappa,
                          &schedule.momentum, &pieces[0], &pieces[1], &pieces[2], &pieces[3], &schedule.limit,
                          &arrays[4], &stop, &arrays[5], &arrays[6]))
        return NULL;
    PyObject *result = NULL;
    for (int i = 0; i < 7; i++)
        if ((items[i] = items_of(arrays[i], &views[i], item_bytes[i], i >= 5, &counts[i])) == NULL)
            goto end;
    schedule.rates = items[0], schedule.firsts = items[1], schedule.high = items[2], schedule.exponent = items[3];
    schedule.num_leaves = counts[0] / LEAF, schedule.num_levels = counts[1], schedule.num_nodes = counts[3];
    const int64_t *leaves = items[4];
    int sound = counts[2] == 4 * counts[3] && counts[3] > 0 && counts[5] == 4 * LEAF * counts[4]
                && counts[6] == counts[5] && stop >= 0 && stop / LEAF < schedule.num_leaves
                && schedule.num_leaves < INT64_C(1) << 31;
    for (Py_ssize_t j = 0; sound && j < counts[4]; j++)
        sound = leaves[j] >= (j ? leaves[j - 1] + 1 : 0) && leaves[j] <= stop / LEAF;
    if (sound) {
        Py_BEGIN_ALLOW_THREADS
        sound = fill(&schedule, leaves, counts[4], stop, items[5], items[6]);
        Py_END_ALLOW_THREADS
    }
    if (sound)
        result = Py_NewRef(Py_None);
    else
        PyErr_SetString(PyExc_ValueError, "the leaves are not those of the schedule before the stop");
end:
    for (int i = 0; i < 7; i++)
        if (views[i].obj != NULL)
            PyBuffer_Release(&views[i]);
    return result;
}
