/* The module `_host`: buffers of arguments, the handle of tables.
 *
 * The layout of tables and outputs is that of `group_meta` and `step_tables`.
 */
#include "_host.h"

/* Arguments */

void release(Buffers *buffers)
{
    while (buffers->num) PyBuffer_Release(&buffers->views[--buffers->num]);
}

static int has_form(const Py_buffer *view, char kind, int num_dims)
{
    const char *format = view->format ? view->format : "B";
    if (view->ndim != num_dims || !format[0] || format[1] || (uintptr_t)view->buf % view->itemsize) return 0;
    if (kind == '?') return format[0] == '?';
    if (!strchr("ilq", format[0])) return 0;
    if (kind == 'n') return view->itemsize == 4 || view->itemsize == 8;
    return view->itemsize == (kind == 'i' ? 4 : 8);
}

int take(PyObject *const *args, const char *forms, Buffers *buffers)
{
    buffers->num = 0;
    for (; *forms; forms += 2, args++) {
        int is_written = !!strchr("ILS?", forms[0]);
        int shape = forms[0] == 'S' ? PyBUF_STRIDES : PyBUF_C_CONTIGUOUS;
        int flags = PyBUF_FORMAT | shape | (is_written ? PyBUF_WRITABLE : 0);
        Py_buffer *view = &buffers->views[buffers->num];
        char kind = forms[0] == 'I' ? 'i' : forms[0] == 'L' || forms[0] == 'S' ? 'l' : forms[0];
        if (PyObject_GetBuffer(*args, view, flags)) {
            PyErr_Clear();
            break;
        }
        buffers->num++;
        if (!has_form(view, kind, forms[1] - '0')) break;
        if (forms[0] == 'S' && view->shape[1] > 1 && view->strides[1] != 8) break;
    }
    if (!*forms) return 1;
    release(buffers);
    return 0;
}

int take_inputs(const Tables *tables, PyObject *const *args, const char *forms, Buffers *buffers)
{
    const char *begin = (const char *)tables->words, *end = begin + 4 * tables->num_words;
    if (!take(args, forms, buffers)) return 0;
    for (int idx = 0; idx < buffers->num; idx++) {
        const char *buf = buffers->views[idx].buf;
        if (buf < end && begin < buf + buffers->views[idx].len) {
            release(buffers);
            return 0;
        }
    }
    return 1;
}

PyObject *refuse(Buffers *buffers)
{
    release(buffers);
    Py_RETURN_NONE;
}

PyObject *done(Buffers *buffers)
{
    release(buffers);
    Py_RETURN_TRUE;
}

/* The handle */

static void tables_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Tables *tables = (Tables *)self;
    release(&tables->held);
    PyMem_Free(tables->groups);
    PyMem_Free(tables->stamps);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static int set_group(Tables *tables, int64_t g, const int64_t *meta, int is_ring)
{
    Group group = {meta[0], meta[1], meta[2], meta[3], meta[4], meta[5], meta[6], meta[7], meta[8], is_ring, -1};
    int64_t most_words = tables->num_words, rows = tables->num_rows;
    int is_inside = group.table >= 0 && group.table <= most_words && group.first >= 0 && group.count >= 0 &&
                    rows <= most_words && group.first <= most_words - rows && group.count <= most_words - rows;
    int is_sane = group.num_ranks >= 1 && group.rank >= 0 && group.rank < group.num_ranks && group.interleave >= 1;
    /* Products of a position stay within int64. */
    is_sane = is_sane && group.block_size >= 0 && group.block_size <= INT32_MAX / group.num_ranks;
    for (int shift = 0; is_sane && shift < 31; shift++)
        if (group.block_size * group.num_ranks == (int64_t)1 << shift) group.shift = shift;
    tables->groups[g] = group;
    is_sane = is_sane && group.interleave <= most(group.block_size, 1);
    is_sane = is_sane && group.width >= 1 && group.width <= group.stride;
    return is_inside && is_sane && group.stride <= (most_words - group.table) / rows;
}

/* Tables(words, group metas, is_ring, low, high, is_dirty, has_spans) */
static PyObject *tables_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char forms[] = "I1L1L1?1?1";
    PyObject *given[7];
    Buffers metas;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OOOOOOO", given, given + 1, given + 2, given + 3, given + 4, given + 5, given + 6))
        return NULL;
    Tables *tables = (Tables *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!tables) return NULL;
    PyObject *held[] = {given[0], given[3], given[4], given[5], given[6]};
    if (!take(held, forms, &tables->held)) goto wrong;
    if (!take(given + 1, "l2?1", &metas)) goto wrong;
    const Py_buffer *views = tables->held.views;
    int64_t num_groups = metas.views[0].shape[0], num_pairs = views[1].shape[0];
    int is_fit = num_groups && num_pairs % num_groups == 0 && metas.views[0].shape[1] == NUM_META_COLUMNS &&
                 metas.views[1].shape[0] == num_groups && views[2].shape[0] == num_pairs &&
                 views[3].shape[0] == num_pairs && views[4].shape[0] == 1;
    tables->words = views[0].buf, tables->num_words = views[0].shape[0];
    tables->low = views[1].buf, tables->high = views[2].buf;
    tables->is_dirty = views[3].buf, tables->has_spans = views[4].buf;
    tables->num_groups = num_groups, tables->num_rows = num_groups ? num_pairs / num_groups : 0;
    tables->groups = PyMem_Calloc(num_groups, sizeof *tables->groups);
    tables->stamps = PyMem_Calloc(tables->num_rows, sizeof *tables->stamps);
    is_fit = is_fit && tables->groups && tables->stamps;
    for (int64_t g = 0; is_fit && g < num_groups; g++) {
        const int64_t *meta = (const int64_t *)metas.views[0].buf + g * NUM_META_COLUMNS;
        is_fit = tables->num_rows && set_group(tables, g, meta, ((const char *)metas.views[1].buf)[g]);
    }
    release(&metas);
    if (is_fit) return (PyObject *)tables;
wrong:
    Py_DECREF(tables);
    PyErr_SetString(PyExc_ValueError, "tables: expected words, metas, rings and a log of one layout");
    return NULL;
}

static PyMethodDef methods[] = {
    METHOD(append_rows), METHOD(add_rows), METHOD(clear_rows), METHOD(drop_heads), METHOD(move_rows),
    METHOD(copy_dirty), METHOD(check_batch), METHOD(write_geometry), METHOD(map_batch), {NULL, NULL, 0, NULL},
};
static PyType_Slot slots_of_type[] = {
    {Py_tp_dealloc, tables_dealloc}, {Py_tp_new, tables_new}, {Py_tp_methods, methods}, {0, NULL},
};
static PyType_Spec spec = {"hybridkv_kernels._host.Tables", sizeof(Tables), 0, Py_TPFLAGS_DEFAULT, slots_of_type};

static int fill_module(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&spec);
    int failed = !type || PyModule_AddObjectRef(module, "Tables", type);
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, fill_module}, {0, NULL}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_host", .m_slots = module_slots};

PyMODINIT_FUNC PyInit__host(void) { return PyModuleDef_Init(&module); }
