/* Finds blocks in LMDB's map of its file, many in one call: its Python interface takes 2 us for each, and touches every
 * page of the value. See "LMDB layout" in docs/design.md.
 *
 * Of LMDB 0.9's format this reads leaf pages of a database without duplicates, in a snapshot that a transaction holds:
 *
 *     a page  u64 number, u16, u16 flags, u16 the end of the places, u16; places of nodes in the page, u16 each
 *     a node  u32 length of the value, u16 flags, u16 length of the key; the key; the value, or the number, u64, of its
 *             first page, behind whose 16 bytes it lies
 *
 * Nothing outside the file's pages is read, whatever they hold. What looks unsound is left to LMDB.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#include "_exact.h"

enum { PAGE_HEADER = 16, FLAGS_AT = 10, END_AT = 12, NODE_HEADER = 8, KEY_BYTES = 12 };
enum { LEAF_PAGE = 0x02, LARGE_VALUE = 0x01 };

typedef int64_t __attribute__((aligned(1), may_alias)) packed_i64;

/* The pages of a file. */
typedef struct {
    const unsigned char *bytes;
    uint64_t page_bytes, num_pages;
} Pages;

/* A version of a block. */
typedef struct {
    uint64_t block;
    uint32_t version;
    uint64_t offset, num_bytes; /* of its value, in the file */
} Node;

static uint64_t big_endian(const unsigned char *bytes, int count)
{
    uint64_t number = 0;
    for (int i = 0; i < count; i++)
        number = number << 8 | bytes[i];
    return number;
}

static uint16_t u16_at(const unsigned char *bytes)
{
    uint16_t number;
    memcpy(&number, bytes, 2);
    return number;
}

/* The number of a leaf page's nodes, or -1 if it is none. */
static int num_nodes(const Pages *file, const unsigned char *page)
{
    uint16_t end = u16_at(page + END_AT);
    int is_leaf = u16_at(page + FLAGS_AT) == LEAF_PAGE && end >= PAGE_HEADER && end <= file->page_bytes;
    return is_leaf ? (end - PAGE_HEADER) / 2 : -1;
}

/* Reads a node of a leaf page; returns 0 if it is none of a block's. */
static int read_node(const Pages *file, const unsigned char *page, int i, Node *node)
{
    uint64_t at = u16_at(page + PAGE_HEADER + 2 * i), data = at + NODE_HEADER + KEY_BYTES, number;
    if (data > file->page_bytes)
        return 0;
    uint32_t num_bytes;
    memcpy(&num_bytes, page + at, 4);
    uint16_t flags = u16_at(page + at + 4), key_bytes = u16_at(page + at + 6);
    if (key_bytes != KEY_BYTES || (flags & ~LARGE_VALUE))
        return 0;
    node->block = big_endian(page + at + NODE_HEADER, 8);
    node->version = (uint32_t)big_endian(page + at + NODE_HEADER + 8, 4);
    node->num_bytes = num_bytes;
    if (!flags) {
        node->offset = (uint64_t)(page - file->bytes) + data;
        return data + num_bytes <= file->page_bytes;
    }
    if (data + 8 > file->page_bytes)
        return 0;
    memcpy(&number, page + data, 8);
    node->offset = number * file->page_bytes + PAGE_HEADER;
    return number < file->num_pages && num_bytes <= (file->num_pages - number) * file->page_bytes - PAGE_HEADER;
}

/* The first node from number `from` on that is not before a version of a block; -1 if a node is unsound. */
static int lower_bound(const Pages *file, const unsigned char *page, int from, int end, uint64_t block,
                       uint32_t version, Node *found)
{
    while (from < end) {
        int middle = from + (end - from) / 2;
        Node node;
        if (!read_node(file, page, middle, &node))
            return -1;
        if (node.block < block || (node.block == block && node.version < version)) {
            from = middle + 1;
        } else {
            end = middle;
            *found = node;
        }
    }
    return from;
}

static Py_ssize_t find_in_leaf(const Pages *file, const unsigned char *page, const packed_i64 *blocks, Py_ssize_t count,
                               uint32_t version, Py_ssize_t first, packed_i64 *places)
{
    int nodes = num_nodes(file, page), at = 0;
    for (; first < count; first++) {
        Node node = {0};
        at = lower_bound(file, page, at, nodes, (uint64_t)blocks[first], version, &node);
        if (at < 0 || at >= nodes)
            break;
        int is_found = node.block == (uint64_t)blocks[first];
        places[2 * first] = is_found ? (int64_t)node.offset : -1;
        places[2 * first + 1] = is_found ? (int64_t)node.num_bytes : -1;
    }
    return first;
}

/* Finds the blocks from number `first` on whose keys' places are in the leaf page that holds `key`; returns the number of
 * the next one, which is `first` if the page is unsound. */
PyObject *find_blocks(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer map = {0}, key = {0}, blocks = {0}, places = {0};
    Py_ssize_t page_bytes, num_pages, first;
    unsigned long version;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*nny*y*knw*", &map, &page_bytes, &num_pages, &key, &blocks, &version, &first,
                          &places))
        return NULL;
    Py_ssize_t count = blocks.len / 8;
    const unsigned char *start = map.buf, *at = key.buf;
    if (page_bytes < PAGE_HEADER || num_pages < 0 || num_pages > map.len / page_bytes || version > UINT32_MAX
        || blocks.len % 8 || places.len / 16 != count || places.len % 16 || first < 0) {
        PyErr_SetString(PyExc_ValueError, "the blocks to find, their places or the file are inconsistent");
    } else if ((uintptr_t)at < (uintptr_t)start || (uintptr_t)at >= (uintptr_t)start + num_pages * page_bytes) {
        result = PyLong_FromSsize_t(first);
    } else {
        Pages file = {start, (uint64_t)page_bytes, (uint64_t)num_pages};
        const unsigned char *page = start + (at - start) / page_bytes * page_bytes;
        result = PyLong_FromSsize_t(
            find_in_leaf(&file, page, blocks.buf, count, (uint32_t)version, first, places.buf));
    }
    Py_buffer *views[] = {&map, &key, &blocks, &places};
    for (int i = 0; i < 4; i++)
        PyBuffer_Release(views[i]);
    return result;
}
