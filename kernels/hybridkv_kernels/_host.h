/* What the parts of `_host` share: tables, buffers of arguments, rows.
 *
 * Every method does its whole work and returns a value, or refuses with None having changed nothing. What it refuses,
 * a wrong argument or a form that it does not know, goes to the numpy code, which does it or says what is wrong: rules
 * and texts of errors live there only. So each method checks all that it is going to touch, then writes.
 */
#ifndef HYBRIDKV_HOST_H
#define HYBRIDKV_HOST_H

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* Rows lie further apart than a processor looks ahead by itself. */
#if defined(__GNUC__)
#define FETCH(address) __builtin_prefetch(address, 1)
#else
#define FETCH(address) ((void)(address))
#endif

#define MAX_VIEWS 12
#define NULL_BLOCK 0
#define PAD_SLOT (-1)
#define WORDS_PER_LINE 16

/* One group, as `GroupMeta` has it; offsets in words. */
typedef struct {
    int64_t table, stride, width, block_size, first, count, num_ranks, rank, interleave;
    int is_ring, shift; /* a position's ordinal is `position >> shift` where blocks span a power of two, else -1 */
} Group;

enum { NUM_META_COLUMNS = 9 };

/* Columns of an `IndexMeta`. */
enum { TABLE_AT, TABLE_WIDTH, FIRST_AT, LEN_AT, INDPTR_AT, INDICES_AT, NUM_INDICES, LAST_AT, PAD_SEQ_LEN, STATE_ROW,
       NUM_INDEX_COLUMNS };

/* Buffers of the arguments of a call, or of the arrays that a handle works on. */
typedef struct {
    Py_buffer views[MAX_VIEWS];
    int num;
} Buffers;

typedef struct {
    PyObject_HEAD
    Buffers held; /* words, then the log's low, high, is_dirty, has_spans */
    int32_t *words;
    int64_t num_words, num_groups, num_rows;
    int64_t *low, *high; /* [num_groups * num_rows]: the columns that changed, by group and row */
    char *is_dirty, *has_spans;
    Group *groups;
    uint32_t *stamps, stamp; /* a row of the call at hand carries its stamp */
} Tables;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static inline int64_t at(const Py_buffer *view, Py_ssize_t idx)
{
    return view->itemsize == 4 ? ((const int32_t *)view->buf)[idx] : ((const int64_t *)view->buf)[idx];
}

/* Take the buffers of arguments; 0, and none is held, if one is not of its form. A form has two characters each:
 *     i int32, l int64, n either of them; I int32, L int64, S int64 whose rows may lie apart, ? bool, all four to write
 *     dimensions */
int take(PyObject *const *args, const char *forms, Buffers *buffers);

/* The same for arguments that are read while the tables are written: none may lie in the tables. */
int take_inputs(const Tables *tables, PyObject *const *args, const char *forms, Buffers *buffers);

void release(Buffers *buffers);
PyObject *refuse(Buffers *buffers);
PyObject *done(Buffers *buffers);

/* Rows */

static inline void new_stamp(Tables *tables)
{
    if (!++tables->stamp) {
        memset(tables->stamps, 0, tables->num_rows * sizeof *tables->stamps);
        tables->stamp = 1;
    }
}

/* Stamp rows; 0 if one does not exist or has the stamp already. */
static inline int stamp_rows(Tables *tables, const Py_buffer *rows)
{
    for (Py_ssize_t i = 0; i < rows->shape[0]; i++) {
        int64_t row = at(rows, i);
        if (row < 0 || row >= tables->num_rows || tables->stamps[row] == tables->stamp) return 0;
        tables->stamps[row] = tables->stamp;
    }
    return 1;
}

typedef struct {
    int32_t *entries, *first, *count;
    int64_t width, pair;
    int is_ring;
} Row;

static inline Row row_of(const Tables *tables, int32_t *words, int64_t group, int64_t row)
{
    const Group *of = &tables->groups[group];
    return (Row){words + of->table + row * of->stride, words + of->first + row, words + of->count + row,
                 of->width, group * tables->num_rows + row, of->is_ring};
}

/* Whether a row can hold the ordinals [first, end). */
static inline int fits(const Row *row, int64_t first, int64_t end)
{
    return 0 <= first && first <= end && end <= INT32_MAX && (row->is_ring ? end - first : end) <= row->width;
}

static inline int is_sound(const Row *row) { return fits(row, *row->first, *row->count); }

/* Columns from 0 on that have held a block of a row. */
static inline int64_t columns_of(const Row *row) { return least(*row->count, row->width); }

static inline int64_t column_of(const Row *row, int64_t ordinal)
{
    return ordinal < row->width ? ordinal : ordinal % row->width;
}

static inline void get(const Row *row, int64_t ordinal, int32_t *ids, int64_t num)
{
    int64_t column = column_of(row, ordinal), run = least(num, row->width - column);
    memcpy(ids, row->entries + column, 4 * run);
    memcpy(ids + run, row->entries, 4 * (num - run));
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}
#define DECLARE(name) PyObject *name(Tables *tables, PyObject *const *args, Py_ssize_t num_args)
DECLARE(append_rows);
DECLARE(add_rows);
DECLARE(clear_rows);
DECLARE(drop_heads);
DECLARE(move_rows);
DECLARE(copy_dirty);
DECLARE(check_batch);
DECLARE(write_geometry);
DECLARE(map_batch);

#endif
