/* A step: its batch, slots, states and page indices from committed tables. */
#include "_host.h"

#define LOOK_AHEAD 24

/* check_batch(rows, scheduled, computed, out): (longest query, longest sequence, highest row)
 * out = | rows [n] | computed [n] | sequence lengths [n] | query starts [n+1] | */
DECLARE(check_batch)
{
    Buffers both;
    if (num_args != 4 || !take(args, "n1n1n1L1", &both)) Py_RETURN_NONE;
    const Py_buffer *rows = &both.views[0], *scheduled = &both.views[1], *computed = &both.views[2];
    Py_ssize_t n = rows->shape[0];
    int64_t *out = both.views[3].buf, num_tokens = 0, max_query = 0, max_seq = 0, highest = -1;
    new_stamp(tables);
    if (scheduled->shape[0] != n || computed->shape[0] != n) return refuse(&both);
    if (both.views[3].shape[0] != 4 * n + 1) return refuse(&both);
    if (!stamp_rows(tables, rows)) return refuse(&both);
    for (Py_ssize_t i = 0; i < n; i++) {
        int64_t num = at(scheduled, i), before = at(computed, i), row = at(rows, i);
        if (num < 1 || num > INT32_MAX || before < 0 || before > INT32_MAX - num) return refuse(&both);
        out[i] = row;
        out[n + i] = before;
        out[2 * n + i] = before + num;
        out[3 * n + i] = num_tokens;
        num_tokens += num;
        max_query = most(max_query, num);
        max_seq = most(max_seq, before + num);
        highest = most(highest, row);
    }
    out[4 * n] = num_tokens;
    if (num_tokens > INT32_MAX) return refuse(&both);
    release(&both);
    return Py_BuildValue("(LLL)", (long long)max_query, (long long)max_seq, (long long)highest);
}

/* Whether query starts rise from 0 to the number of tokens at most, and other lengths are none below 0. */
static int is_batch(const Py_buffer *rows, const Py_buffer *starts, const Py_buffer *computed, int64_t num_tokens)
{
    Py_ssize_t n = rows->shape[0];
    if (starts->shape[0] < n + 1 || computed->shape[0] != n || at(starts, 0) || at(starts, n) > num_tokens) return 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        int64_t num = at(starts, i + 1) - at(starts, i);
        if (num < 0 || at(computed, i) < 0 || at(computed, i) > INT32_MAX - num) return 0;
    }
    return 1;
}

/* write_geometry(rows, query starts, computed, and the six outputs of the batch's geometry) */
DECLARE(write_geometry)
{
    Buffers both;
    (void)tables;
    if (num_args != 9 || !take(args, "l1l1l1I1I1I1?1I1L1", &both)) Py_RETURN_NONE;
    const Py_buffer *in = both.views, *out = both.views + 3;
    Py_ssize_t n = in[0].shape[0], num_reqs = out[0].shape[0], num_tokens = out[4].shape[0], t = 0;
    int is_fit = out[1].shape[0] == num_reqs + 1 && out[2].shape[0] == num_reqs && out[3].shape[0] == num_reqs;
    if (!is_fit || n > num_reqs || out[5].shape[0] != num_tokens) return refuse(&both);
    if (!is_batch(&in[0], &in[1], &in[2], num_tokens)) return refuse(&both);
    const int64_t *of_rows = in[0].buf, *starts = in[1].buf, *computed = in[2].buf;
    int32_t *rows = out[0].buf, *query_starts = out[1].buf, *seq_lens = out[2].buf, *token_rows = out[4].buf;
    char *zero_start = out[3].buf;
    int64_t *positions = out[5].buf;
    for (Py_ssize_t i = 0; i < num_reqs; i++) {
        int is_live = i < n;
        int64_t num = is_live ? starts[i + 1] - starts[i] : 0;
        rows[i] = is_live ? (int32_t)of_rows[i] : PAD_SLOT;
        query_starts[i] = (int32_t)starts[least(i, n)];
        seq_lens[i] = is_live ? (int32_t)(computed[i] + num) : 0;
        zero_start[i] = is_live && computed[i] == 0;
        for (int64_t k = 0; k < num; k++) token_rows[t + k] = rows[i];
        for (int64_t k = 0; k < num; k++) positions[t + k] = computed[i] + k;
        t += num;
    }
    query_starts[num_reqs] = (int32_t)starts[n];
    for (; t < num_tokens; t++) token_rows[t] = PAD_SLOT, positions[t] = 0;
    return done(&both);
}

static int32_t entry_of(const Row *row, int64_t ordinal)
{
    int is_live = *row->first <= ordinal && ordinal < *row->count;
    return is_live ? row->entries[column_of(row, ordinal)] : NULL_BLOCK;
}

/* Slots of the positions [position, end) of a row. */
static void map_chunk(const Group *group, const Row *row, int64_t position, int64_t end, int64_t *slots)
{
    int64_t size = group->block_size, span = size * group->num_ranks, turn = group->interleave * group->num_ranks;
    while (position < end) {
        int64_t ordinal = group->shift < 0 ? position / span : position >> group->shift;
        int64_t stop = least(end, (ordinal + 1) * span), num = stop - position;
        int64_t entry = entry_of(row, ordinal), begin = entry * size + position - ordinal * span;
        if (entry == NULL_BLOCK)
            for (int64_t k = 0; k < num; k++) slots[k] = PAD_SLOT;
        else if (group->num_ranks == 1)
            for (int64_t k = 0; k < num; k++) slots[k] = begin + k;
        else
            for (int64_t k = 0, p = position; k < num; k++, p++) {
                int is_ours = p / group->interleave % group->num_ranks == group->rank;
                int64_t offset = p % span / turn * group->interleave + p % group->interleave;
                slots[k] = is_ours ? entry * size + offset : PAD_SLOT;
            }
        slots += num;
        position = stop;
    }
}

/* Tokens that a rank holds from ordinal `first` on of a sequence. */
static int64_t local_len(const Group *group, int64_t seq_len, int64_t first)
{
    int64_t turn = group->interleave * group->num_ranks;
    int64_t last = most(least(seq_len % turn - group->rank * group->interleave, group->interleave), 0);
    return most(seq_len / turn * group->interleave + last - first * group->block_size, 0);
}

/* Where a batch is, and where its page indices go. */
typedef struct {
    const Py_buffer *rows, *starts, *computed;
    int64_t num_reqs;
    int32_t *index;
    int64_t num_index;
} Batch;

static int has_room(const Batch *batch, int64_t begin, int64_t num)
{
    return begin >= 0 && num >= 0 && num <= batch->num_index && begin <= batch->num_index - num;
}

static int has_index_room(const Group *group, const int64_t *meta, const Batch *batch, int64_t num_state_rows)
{
    int64_t r = batch->num_reqs;
    if (meta[STATE_ROW] >= 0 && meta[STATE_ROW] > num_state_rows - group->width) return 0;
    if (meta[TABLE_AT] >= 0 && meta[TABLE_WIDTH] > batch->num_index / most(r, 1)) return 0;
    if (meta[TABLE_AT] >= 0 && !(has_room(batch, meta[TABLE_AT], r * meta[TABLE_WIDTH]) &&
                                 has_room(batch, meta[FIRST_AT], r) && has_room(batch, meta[LEN_AT], r))) return 0;
    return meta[INDPTR_AT] < 0 || (has_room(batch, meta[INDPTR_AT], r + 1) && has_room(batch, meta[LAST_AT], r) &&
                                   has_room(batch, meta[INDICES_AT], meta[NUM_INDICES]));
}

static void write_index(const Tables *tables, int32_t *words, int64_t g, const int64_t *meta, const Batch *batch)
{
    const Group *group = &tables->groups[g];
    int32_t *index = batch->index;
    int64_t total = 0, span = group->block_size * group->num_ranks;
    if (meta[INDPTR_AT] >= 0) index[meta[INDPTR_AT]] = 0;
    for (int64_t i = 0; i < batch->num_reqs; i++) {
        int is_live = i < batch->rows->shape[0];
        Row row = {0};
        int64_t first = 0, held = 0, num_tokens = 0;
        if (is_live) {
            row = row_of(tables, words, g, at(batch->rows, i));
            first = is_sound(&row) ? *row.first : 0;
            held = is_sound(&row) ? *row.count - first : 0;
            num_tokens = at(batch->computed, i) + at(batch->starts, i + 1) - at(batch->starts, i);
            num_tokens = local_len(group, num_tokens, first);
        }
        if (meta[TABLE_AT] >= 0) {
            int32_t *of_row = index + meta[TABLE_AT] + i * meta[TABLE_WIDTH];
            int64_t num = least(held, meta[TABLE_WIDTH]);
            if (num) get(&row, first, of_row, num);
            memset(of_row + num, 0, 4 * (meta[TABLE_WIDTH] - num));
            index[meta[FIRST_AT] + i] = (int32_t)(first * span);
            index[meta[LEN_AT] + i] = (int32_t)(is_live ? num_tokens : meta[PAD_SEQ_LEN]);
        }
        if (meta[INDPTR_AT] >= 0) {
            int64_t num = least((num_tokens + group->block_size - 1) / group->block_size, held);
            int64_t room = most(meta[NUM_INDICES] - total, 0);
            if (num) get(&row, first, index + meta[INDICES_AT] + least(total, meta[NUM_INDICES]), least(num, room));
            total += num;
            index[meta[INDPTR_AT] + i + 1] = (int32_t)total;
            index[meta[LAST_AT] + i] =
                (int32_t)(num ? least(num_tokens - (num - 1) * group->block_size, group->block_size) : 0);
        }
    }
}

/* map_batch(words, index metas, rows, computed, query starts, slots, state slots, index, padded batch positions) */
DECLARE(map_batch)
{
    Buffers both;
    if (num_args != 9 || !take(args, "i1l2l1l1i1S2L2I1i1", &both)) Py_RETURN_NONE;
    const Py_buffer *views = both.views, *slots = &views[5], *states = &views[6];
    Batch batch = {&views[2], &views[4], &views[3], views[8].shape[0], views[7].buf, views[7].shape[0]};
    const int64_t *rows = views[2].buf, *computed = views[3].buf;
    const int32_t *starts = views[4].buf;
    int64_t num_tokens = slots->shape[1], n = batch.rows->shape[0], num_reqs = batch.num_reqs;
    const int64_t *metas = views[1].buf;
    int32_t *words = views[0].buf;
    if (views[0].shape[0] != tables->num_words || views[1].shape[0] != tables->num_groups) return refuse(&both);
    if (views[1].shape[1] != NUM_INDEX_COLUMNS || slots->shape[0] != tables->num_groups) return refuse(&both);
    if (n > num_reqs || states->shape[1] != num_reqs) return refuse(&both);
    if (!is_batch(batch.rows, batch.starts, batch.computed, num_tokens)) return refuse(&both);
    for (int64_t i = 0; i < n; i++)
        if (at(batch.rows, i) < 0 || at(batch.rows, i) >= tables->num_rows) return refuse(&both);
    for (int64_t g = 0; g < tables->num_groups; g++)
        if (!has_index_room(&tables->groups[g], metas + g * NUM_INDEX_COLUMNS, &batch, states->shape[0]))
            return refuse(&both);
    for (int64_t g = 0; g < tables->num_groups; g++) {
        const Group *group = &tables->groups[g];
        const int64_t *meta = metas + g * NUM_INDEX_COLUMNS;
        int64_t *of_group = (int64_t *)((char *)slots->buf + g * slots->strides[0]), t = 0;
        for (int64_t i = 0; group->block_size && i < n; i++) {
            Row row = row_of(tables, words, g, rows[i]);
            int64_t begin = computed[i], num = starts[i + 1] - starts[i];
            if (i + LOOK_AHEAD < n && group->shift >= 0) {
                int64_t ordinal = computed[i + LOOK_AHEAD] >> group->shift;
                Row ahead = row_of(tables, words, g, rows[i + LOOK_AHEAD]);
                FETCH(ahead.entries + (ordinal < ahead.width ? ordinal : 0));
            }
            map_chunk(group, &row, begin, begin + num, of_group + t);
            t += num;
        }
        for (; t < num_tokens; t++) of_group[t] = PAD_SLOT;
        for (int64_t c = 0; meta[STATE_ROW] >= 0 && c < group->width; c++)
            for (int64_t i = 0; i < num_reqs; i++) {
                int32_t entry = i < n ? row_of(tables, words, g, at(batch.rows, i)).entries[c] : NULL_BLOCK;
                ((int64_t *)states->buf)[(meta[STATE_ROW] + c) * num_reqs + i] = entry == NULL_BLOCK ? PAD_SLOT : entry;
            }
        if (meta[TABLE_AT] >= 0 || meta[INDPTR_AT] >= 0) write_index(tables, words, g, meta, &batch);
    }
    return done(&both);
}
