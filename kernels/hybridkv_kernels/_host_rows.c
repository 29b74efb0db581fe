/* Row operations on tables, copies of what they changed. */
#include "_host.h"

static void mark(Tables *tables, const Row *row, int64_t low, int64_t high)
{
    tables->is_dirty[row->pair] = *tables->has_spans = 1;
    if (low >= high) return;
    tables->low[row->pair] = least(tables->low[row->pair], low);
    tables->high[row->pair] = most(tables->high[row->pair], high);
}

static void mark_run(Tables *tables, const Row *row, int64_t column, int64_t num)
{
    int wraps = column + num > row->width;
    mark(tables, row, wraps ? 0 : column, wraps ? row->width : column + num);
}

static void put(const Row *row, int64_t ordinal, const int32_t *ids, int64_t num)
{
    int64_t column = column_of(row, ordinal), run = least(num, row->width - column);
    memcpy(row->entries + column, ids, 4 * run);
    memcpy(row->entries, ids + run, 4 * (num - run));
}

static void put_null(const Row *row, int64_t ordinal, int64_t num)
{
    int64_t column = column_of(row, ordinal), run = least(num, row->width - column);
    memset(row->entries + column, 0, 4 * run);
    memset(row->entries, 0, 4 * (num - run));
}

static void fetch(const int32_t *words, int64_t num)
{
    for (int64_t k = 0; k < num; k += WORDS_PER_LINE) FETCH(words + k);
}

/* Fetch the row that follows row i of a call, which is about as long. */
static void fetch_next(const Tables *tables, int64_t group, const Py_buffer *rows, Py_ssize_t i, int64_t num)
{
    if (i + 1 < rows->shape[0]) fetch(row_of(tables, tables->words, group, at(rows, i + 1)).entries, num);
}

/* The groups that a call is about: one, or all of them for -1. */
static int groups_of(const Tables *tables, PyObject *arg, int64_t *begin, int64_t *end)
{
    *begin = PyLong_AsLongLong(arg);
    if (PyErr_Occurred()) return PyErr_Clear(), 0;
    if (*begin < -1 || *begin >= tables->num_groups) return 0;
    *end = *begin < 0 ? tables->num_groups : *begin + 1;
    *begin = most(*begin, 0);
    return 1;
}

/* append_rows(group, rows, counts, block_ids), add_rows(rows, counts, block_ids) */
static PyObject *write_rows(
    Tables *tables, PyObject *const *args, int64_t begin, int64_t end, int is_new, const char *forms)
{
    Buffers in;
    if (!take_inputs(tables, args, forms, &in)) Py_RETURN_NONE;
    const Py_buffer *rows = &in.views[0], *counts = &in.views[1];
    const int32_t *ids = in.views[2].buf;
    Py_ssize_t num = rows->shape[0], num_ids = in.views[2].shape[0], total = 0, k = 0;
    uint32_t signs = 0;
    if (counts->ndim == 2 && counts->shape[0] != end - begin) return refuse(&in);
    if (counts->shape[counts->ndim - 1] != num) return refuse(&in);
    new_stamp(tables);
    if (!stamp_rows(tables, rows)) return refuse(&in);
    for (int64_t group = begin; group < end; group++)
        for (Py_ssize_t i = 0; i < num; i++) {
            Row row = row_of(tables, tables->words, group, at(rows, i));
            int64_t n = at(counts, k++);
            if (n < 0 || n > INT32_MAX || !is_sound(&row)) return refuse(&in);
            if (!fits(&row, is_new ? 0 : *row.first, (is_new ? 0 : *row.count) + n)) return refuse(&in);
            total += n;
        }
    /* The sign bit of `id - 1` or of `id` is set for an id below 1; a minimum takes twice as long. */
    for (Py_ssize_t i = 0; i < num_ids; i++) signs |= (uint32_t)ids[i] | ((uint32_t)ids[i] - 1);
    if (total != num_ids || signs >> 31) return refuse(&in);
    k = 0;
    for (int64_t group = begin; group < end; group++)
        for (Py_ssize_t i = 0; i < num; i++) {
            Row row = row_of(tables, tables->words, group, at(rows, i));
            int64_t n = at(counts, k++), start = is_new ? 0 : *row.count, used = is_new ? columns_of(&row) : 0;
            if (!n && !is_new) continue;
            if (is_new) fetch_next(tables, group, rows, i, n);
            put(&row, start, ids, n);
            if (used > n) put_null(&row, n, used - n);
            if (is_new) *row.first = 0;
            *row.count = (int32_t)(start + n);
            mark_run(tables, &row, column_of(&row, start), most(n, used));
            ids += n;
        }
    return done(&in);
}

DECLARE(append_rows)
{
    int64_t begin, end;
    if (num_args != 4 || !groups_of(tables, args[0], &begin, &end)) Py_RETURN_NONE;
    return write_rows(tables, args + 1, begin, end, 0, PyLong_AsLongLong(args[0]) < 0 ? "n1n2i1" : "n1n1i1");
}

DECLARE(add_rows)
{
    if (num_args != 3) Py_RETURN_NONE;
    return write_rows(tables, args, 0, tables->num_groups, 1, "n1n2i1");
}

/* clear_rows(rows): the ids that they held */
DECLARE(clear_rows)
{
    Buffers in;
    if (num_args != 1 || !take_inputs(tables, args, "n1", &in)) Py_RETURN_NONE;
    const Py_buffer *rows = &in.views[0];
    int64_t num_ids = 0;
    new_stamp(tables);
    if (!stamp_rows(tables, rows)) return refuse(&in);
    for (int64_t group = 0; group < tables->num_groups; group++)
        for (Py_ssize_t i = 0; i < rows->shape[0]; i++) {
            Row row = row_of(tables, tables->words, group, at(rows, i));
            if (!is_sound(&row)) return refuse(&in);
            if (*row.count) tables->stamps[at(rows, i)] = 0; /* used in some group */
            num_ids += *row.count - *row.first;
        }
    PyObject *result = PyByteArray_FromStringAndSize(NULL, 4 * num_ids);
    if (!result) return release(&in), NULL;
    int32_t *ids = (int32_t *)PyByteArray_AsString(result);
    for (int64_t group = 0; group < tables->num_groups; group++)
        for (Py_ssize_t i = 0; i < rows->shape[0]; i++) {
            if (tables->stamps[at(rows, i)]) continue;
            Row row = row_of(tables, tables->words, group, at(rows, i));
            int64_t num = *row.count - *row.first;
            fetch_next(tables, group, rows, i, columns_of(&row));
            get(&row, *row.first, ids, num);
            put_null(&row, *row.first, num);
            mark(tables, &row, 0, columns_of(&row));
            *row.first = *row.count = 0;
            ids += num;
        }
    release(&in);
    return result;
}

/* drop_heads(group, rows, first_blocks): the ids of the ordinals below */
DECLARE(drop_heads)
{
    Buffers in;
    int64_t group, end, num_ids = 0;
    if (num_args != 3 || !groups_of(tables, args[0], &group, &end) || end - group != 1) Py_RETURN_NONE;
    if (!take_inputs(tables, args + 1, "n1n1", &in)) Py_RETURN_NONE;
    const Py_buffer *rows = &in.views[0], *firsts = &in.views[1];
    new_stamp(tables);
    if (rows->shape[0] != firsts->shape[0] || !stamp_rows(tables, rows)) return refuse(&in);
    for (Py_ssize_t i = 0; i < rows->shape[0]; i++) {
        Row row = row_of(tables, tables->words, group, at(rows, i));
        int64_t first = at(firsts, i);
        if (!is_sound(&row) || first < 0 || first > *row.count) return refuse(&in);
        num_ids += most(first - *row.first, 0);
    }
    PyObject *result = PyByteArray_FromStringAndSize(NULL, 4 * num_ids);
    if (!result) return release(&in), NULL;
    int32_t *ids = (int32_t *)PyByteArray_AsString(result);
    for (Py_ssize_t i = 0; i < rows->shape[0]; i++) {
        Row row = row_of(tables, tables->words, group, at(rows, i));
        int64_t first = at(firsts, i), num = first - *row.first;
        if (num <= 0) continue;
        get(&row, *row.first, ids, num);
        put_null(&row, *row.first, num);
        mark_run(tables, &row, column_of(&row, *row.first), num);
        *row.first = (int32_t)first;
        ids += num;
    }
    release(&in);
    return result;
}

/* move_rows(sources, targets) */
DECLARE(move_rows)
{
    Buffers in;
    if (num_args != 2 || !take_inputs(tables, args, "n1n1", &in)) Py_RETURN_NONE;
    const Py_buffer *sources = &in.views[0], *targets = &in.views[1];
    Py_ssize_t num = sources->shape[0];
    new_stamp(tables);
    if (targets->shape[0] != num || !stamp_rows(tables, sources) || !stamp_rows(tables, targets)) return refuse(&in);
    for (int64_t group = 0; group < tables->num_groups; group++)
        for (Py_ssize_t i = 0; i < num; i++) {
            Row source = row_of(tables, tables->words, group, at(sources, i));
            Row target = row_of(tables, tables->words, group, at(targets, i));
            if (!is_sound(&source) || !is_sound(&target)) return refuse(&in);
        }
    for (int64_t group = 0; group < tables->num_groups; group++)
        for (Py_ssize_t i = 0; i < num; i++) {
            Row source = row_of(tables, tables->words, group, at(sources, i));
            Row target = row_of(tables, tables->words, group, at(targets, i));
            int64_t columns = columns_of(&source), used = columns_of(&target);
            fetch_next(tables, group, sources, i, columns);
            fetch_next(tables, group, targets, i, columns);
            /* A column depends on the ordinal alone, so entries keep theirs. */
            memcpy(target.entries, source.entries, 4 * columns);
            if (used > columns) memset(target.entries + columns, 0, 4 * (used - columns));
            memset(source.entries, 0, 4 * columns);
            *target.first = *source.first;
            *target.count = *source.count;
            *source.first = *source.count = 0;
            mark(tables, &source, 0, columns);
            mark(tables, &target, 0, most(columns, used));
        }
    return done(&in);
}

/* Where in the words a pair's changed columns begin; how many, none for 0 or less. */
static int64_t span_of(const Tables *tables, int64_t pair, int64_t *begin)
{
    const Group *group = &tables->groups[pair / tables->num_rows];
    *begin = group->table + pair % tables->num_rows * group->stride + tables->low[pair];
    return tables->high[pair] - tables->low[pair];
}

/* copy_dirty(mirror): how many words of entries changed; they and all live ranges are in the mirror then */
DECLARE(copy_dirty)
{
    Buffers out;
    if (num_args != 1 || !take(args, "I1", &out)) Py_RETURN_NONE;
    if (out.views[0].shape[0] != tables->num_words) return refuse(&out);
    int32_t *mirror = out.views[0].buf;
    int64_t num_pairs = tables->num_groups * tables->num_rows, num_copied = 0;
    for (int64_t pair = 0; pair < num_pairs; pair++) {
        const char *next = memchr(tables->is_dirty + pair, 1, num_pairs - pair);
        if (!next) break;
        pair = next - tables->is_dirty;
        const Group *group = &tables->groups[pair / tables->num_rows];
        int64_t row = pair % tables->num_rows, begin, next_begin, num = span_of(tables, pair, &begin);
        tables->is_dirty[pair] = 0;
        mirror[group->first + row] = tables->words[group->first + row];
        mirror[group->count + row] = tables->words[group->count + row];
        if (num <= 0) continue;
        int64_t next_num = pair + 1 < num_pairs ? span_of(tables, pair + 1, &next_begin) : 0;
        if (next_num > 0) fetch(mirror + next_begin, next_num), fetch(tables->words + next_begin, next_num);
        memcpy(mirror + begin, tables->words + begin, 4 * num);
        tables->low[pair] = INT32_MAX;
        tables->high[pair] = 0;
        num_copied += num;
    }
    *tables->has_spans = 0;
    release(&out);
    return PyLong_FromLongLong(num_copied);
}
