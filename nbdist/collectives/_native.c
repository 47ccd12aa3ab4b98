/* What a small collective in shared memory does between two lines of Python.
 *
 * The semaphores, words and slots are those of _gate_shared.py and _slots.py, which work
 * without this module too: it does the same things, without an interpreter between them.
 * Addresses come from Python as integers; Python keeps the memory mapped.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <sched.h>
#include <semaphore.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

#define EDITION 1 /* of what Python calls here: raise it with _crossing.py's */

/* A wall clock that is set back makes waits longer; the other one cannot be set. */
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 30)
#define WAIT_CLOCK CLOCK_MONOTONIC
#define WAIT(semaphore, until) sem_clockwait(semaphore, CLOCK_MONOTONIC, until)
#else
#define WAIT_CLOCK CLOCK_REALTIME
#define WAIT(semaphore, until) sem_timedwait(semaphore, until)
#endif

/* -- crossing: every rank posts to every other one, and waits for every other one ----- */

typedef struct {
    PyObject_HEAD
    unsigned long long step; /* times crossed */
    char stopped;            /* by Python, to be looked after */
    const int64_t *closed;   /* not 0 once a rank has left for good */
    Py_ssize_t waiting_for;  /* index into `inbound` */
    Py_ssize_t peers;
    int spins, yields;
    long nap_ns;
    sem_t **inbound, **outbound;
    int64_t **words; /* of even steps, then of odd ones; in each this rank's comes first */
} Crossing;

static bool
read_addresses(PyObject *list, Py_ssize_t expected, void ***out)
{
    if (PySequence_Size(list) != expected) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "expected %zd addresses", expected);
        return false;
    }
    void **found = *out = calloc(expected ? (size_t)expected : 1, sizeof(void *));
    if (!found) {
        PyErr_NoMemory();
        return false;
    }
    for (Py_ssize_t i = 0; i < expected; i++) {
        PyObject *item = PySequence_GetItem(list, i);
        if (!item)
            return false;
        found[i] = PyLong_AsVoidPtr(item);
        Py_DECREF(item);
        if (!found[i]) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "an address is 0");
            return false;
        }
    }
    return true;
}

static int
crossing_init(Crossing *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"inbound", "outbound", "words", "closed",
                            "spins",   "yields",   "nap_s", NULL};
    PyObject *inbound, *outbound, *words, *closed;
    double nap_s;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOiid", names, &inbound, &outbound,
                                     &words, &closed, &self->spins, &self->yields,
                                     &nap_s))
        return -1;
    if (self->inbound || self->outbound || self->words) {
        PyErr_SetString(PyExc_RuntimeError, "a crossing is made once");
        return -1;
    }
    Py_ssize_t peers = self->peers = PySequence_Size(inbound);
    self->closed = PyLong_AsVoidPtr(closed);
    self->nap_ns = (long)(nap_s * 1e9);
    if (peers < 0 || !self->closed || !read_addresses(inbound, peers, (void ***)&self->inbound) ||
        !read_addresses(outbound, peers, (void ***)&self->outbound) ||
        !read_addresses(words, 2 * (peers + 1), (void ***)&self->words))
        return -1;
    return 0;
}

static void
crossing_dealloc(Crossing *self)
{
    free(self->inbound);
    free(self->outbound);
    free(self->words);
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* Whether the semaphore could be taken: looks, yields, and one sleep in the end. */
static bool
take(const Crossing *self, sem_t *semaphore)
{
    for (int i = 0; i <= self->spins; i++)
        if (sem_trywait(semaphore) == 0)
            return true;
    bool taken = false;
    Py_BEGIN_ALLOW_THREADS
    for (int i = 0; i < self->yields && !taken; i++) {
        sched_yield(); /* to the rank we wait for, where ranks share cores */
        taken = sem_trywait(semaphore) == 0;
    }
    if (!taken) {
        struct timespec until;
        clock_gettime(WAIT_CLOCK, &until);
        until.tv_nsec += self->nap_ns;
        until.tv_sec += until.tv_nsec / 1000000000L;
        until.tv_nsec %= 1000000000L;
        taken = WAIT(semaphore, &until) == 0; /* a signal ends it too */
    }
    Py_END_ALLOW_THREADS
    return taken;
}

/* True or False: all are there, and brought the same word or not. None: look why not. */
static PyObject *
crossing_resume(Crossing *self, PyObject *Py_UNUSED(none))
{
    while (self->waiting_for < self->peers) {
        if (!take(self, self->inbound[self->waiting_for]))
            Py_RETURN_NONE;
        self->waiting_for++;
    }
    if (self->stopped || *self->closed)
        Py_RETURN_NONE;
    int64_t **words = self->words + (self->step & 1) * (unsigned)(self->peers + 1);
    bool agreed = true;
    for (Py_ssize_t i = 1; i <= self->peers; i++)
        agreed &= *words[i] == *words[0];
    self->step++;
    return PyBool_FromLong(agreed);
}

static PyObject *
crossing_cross(Crossing *self, PyObject *word)
{
    long long value = PyLong_AsLongLong(word);
    if (value == -1 && PyErr_Occurred())
        return NULL;
    *self->words[(self->step & 1) * (unsigned)(self->peers + 1)] = value;
    for (Py_ssize_t i = 0; i < self->peers; i++)
        sem_post(self->outbound[i]);
    self->waiting_for = 0;
    return crossing_resume(self, NULL);
}

static PyMethodDef crossing_methods[] = {
    {"cross", (PyCFunction)crossing_cross, METH_O, NULL},
    {"resume", (PyCFunction)crossing_resume, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef crossing_members[] = {
    {"step", T_ULONGLONG, offsetof(Crossing, step), READONLY, NULL},
    {"stopped", T_BOOL, offsetof(Crossing, stopped), 0, NULL},
    {"waiting_for", T_PYSSIZET, offsetof(Crossing, waiting_for), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot crossing_slots[] = {
    {Py_tp_init, crossing_init},
    {Py_tp_dealloc, crossing_dealloc},
    {Py_tp_methods, crossing_methods},
    {Py_tp_members, crossing_members},
    {0, NULL},
};

static PyType_Spec crossing_spec = {
    .name = "nbdist.collectives._native.Crossing",
    .basicsize = sizeof(Crossing),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = crossing_slots,
};

/* -- reductions of a few kilobytes ----------------------------------------------------- */

typedef void (*Kernel)(void *out, void *const *rows, int count, size_t length);

/* Row by row in rank order, so that every rank gets the same bits. */
#define KERNEL(NAME, TYPE, COMBINED, FINISHED)                                           \
    static void NAME(void *out, void *const *rows, int count, size_t length)             \
    {                                                                                    \
        TYPE *restrict total = out;                                                      \
        memcpy(total, rows[0], length * sizeof(TYPE));                                   \
        for (int row = 1; row < count; row++) {                                          \
            const TYPE *restrict other = rows[row];                                      \
            for (size_t i = 0; i < length; i++) {                                        \
                const TYPE a = total[i], b = other[i];                                   \
                total[i] = (TYPE)(COMBINED);                                             \
            }                                                                            \
        }                                                                                \
        FINISHED                                                                         \
    }
#define NOTHING
#define DIVIDED                                                                          \
    for (size_t i = 0; i < length; i++)                                                  \
        total[i] /= count;
#define SMALLER(a, b) ((b) < (a) || (b) != (b) ? ((a) != (a) ? (a) : (b)) : (a))
#define GREATER(a, b) ((b) > (a) || (b) != (b) ? ((a) != (a) ? (a) : (b)) : (a))
/* Integers are added and multiplied as unsigned ones: they wrap, as torch's do. */
#define FLOATS(SUFFIX, TYPE)                                                             \
    KERNEL(sum_##SUFFIX, TYPE, a + b, NOTHING)                                           \
    KERNEL(mean_##SUFFIX, TYPE, a + b, DIVIDED)                                          \
    KERNEL(product_##SUFFIX, TYPE, a *b, NOTHING)                                        \
    KERNEL(min_##SUFFIX, TYPE, SMALLER(a, b), NOTHING)                                   \
    KERNEL(max_##SUFFIX, TYPE, GREATER(a, b), NOTHING)
#define INTEGERS(SUFFIX, TYPE, UNSIGNED)                                                 \
    KERNEL(sum_##SUFFIX, UNSIGNED, a + b, NOTHING)                                       \
    KERNEL(product_##SUFFIX, UNSIGNED, a *b, NOTHING)                                    \
    KERNEL(min_##SUFFIX, TYPE, b < a ? b : a, NOTHING)                                   \
    KERNEL(max_##SUFFIX, TYPE, b > a ? b : a, NOTHING)                                   \
    KERNEL(band_##SUFFIX, UNSIGNED, a &b, NOTHING)                                       \
    KERNEL(bor_##SUFFIX, UNSIGNED, a | b, NOTHING)                                       \
    KERNEL(bxor_##SUFFIX, UNSIGNED, a ^ b, NOTHING)

FLOATS(float32, float)
FLOATS(float64, double)
INTEGERS(int32, int32_t, uint32_t)
INTEGERS(int64, int64_t, uint64_t)

#define ROW(OP, S, SIZE) {#OP " " #S, SIZE, OP##_##S}
#define FLOAT_ROWS(S, SIZE)                                                              \
    ROW(sum, S, SIZE), ROW(mean, S, SIZE), ROW(product, S, SIZE), ROW(min, S, SIZE),     \
        ROW(max, S, SIZE)
#define INTEGER_ROWS(S, SIZE)                                                            \
    ROW(sum, S, SIZE), ROW(product, S, SIZE), ROW(min, S, SIZE), ROW(max, S, SIZE),      \
        ROW(band, S, SIZE), ROW(bor, S, SIZE), ROW(bxor, S, SIZE)

static const struct {
    const char *name; /* op and dtype */
    size_t itemsize;
    Kernel run;
} kernels[] = {
    FLOAT_ROWS(float32, 4),
    FLOAT_ROWS(float64, 8),
    INTEGER_ROWS(int32, 4),
    INTEGER_ROWS(int64, 8),
};
#define KERNELS ((Py_ssize_t)(sizeof kernels / sizeof kernels[0]))
#define MOST_ROWS 64
#define CHUNK_BYTES 8192
#define LONG_BYTES 32768 /* from here other threads may run meanwhile */

/* copy(target, source, bytes) */
static PyObject *
copy(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "copy(target, source, bytes)");
        return NULL;
    }
    void *target = PyLong_AsVoidPtr(args[0]), *source = PyLong_AsVoidPtr(args[1]);
    size_t bytes = PyLong_AsSize_t(args[2]);
    if (PyErr_Occurred())
        return NULL;
    if (bytes < LONG_BYTES) {
        if (bytes) /* an empty tensor has no address */
            memcpy(target, source, bytes);
    } else {
        Py_BEGIN_ALLOW_THREADS
        memcpy(target, source, bytes);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static Py_ssize_t
read_pointers(PyObject *tuple, char **found)
{
    Py_ssize_t size = PyTuple_Size(tuple);
    if (size > MOST_ROWS)
        PyErr_Format(PyExc_ValueError, "%zd addresses: at most %d", size, MOST_ROWS);
    for (Py_ssize_t i = 0; i < size && !PyErr_Occurred(); i++)
        found[i] = PyLong_AsVoidPtr(PyTuple_GetItem(tuple, i));
    return PyErr_Occurred() ? -1 : size;
}

/* A chunk of all rows is reduced in the nearest cache, and goes to all outs from there;
 * so an out may be one of the rows. */
static void
reduce_chunks(Py_ssize_t kernel, char **outs, Py_ssize_t out_count, char **rows,
              Py_ssize_t row_count, size_t length)
{
    char total[CHUNK_BYTES] __attribute__((aligned(64)));
    size_t itemsize = kernels[kernel].itemsize, chunk = CHUNK_BYTES / itemsize;
    for (size_t done = 0; done < length; done += chunk) {
        size_t now = length - done < chunk ? length - done : chunk;
        kernels[kernel].run(total, (void *const *)rows, (int)row_count, now);
        for (Py_ssize_t i = 0; i < row_count; i++)
            rows[i] += now * itemsize;
        for (Py_ssize_t i = 0; i < out_count; i++) {
            memcpy(outs[i], total, now * itemsize);
            outs[i] += now * itemsize;
        }
    }
}

/* reduce(kernel, outs, rows, length): `kernel` is an index into KERNELS */
static PyObject *
reduce(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "reduce(kernel, outs, rows, length)");
        return NULL;
    }
    char *outs[MOST_ROWS], *rows[MOST_ROWS];
    Py_ssize_t kernel = PyLong_AsSsize_t(args[0]);
    Py_ssize_t out_count = read_pointers(args[1], outs);
    Py_ssize_t row_count = read_pointers(args[2], rows);
    size_t length = PyLong_AsSize_t(args[3]);
    if (PyErr_Occurred())
        return NULL;
    if (kernel < 0 || kernel >= KERNELS || row_count < 1) {
        PyErr_SetString(PyExc_ValueError, "no such kernel, or no rows");
        return NULL;
    }
    if (length * kernels[kernel].itemsize < LONG_BYTES) {
        reduce_chunks(kernel, outs, out_count, rows, row_count, length);
    } else {
        Py_BEGIN_ALLOW_THREADS
        reduce_chunks(kernel, outs, out_count, rows, row_count, length);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"copy", (PyCFunction)(void (*)(void))copy, METH_FASTCALL, NULL},
    {"reduce", (PyCFunction)(void (*)(void))reduce, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static int
fill(PyObject *module)
{
    PyObject *names = PyTuple_New(KERNELS);
    if (!names)
        return -1;
    for (Py_ssize_t i = 0; i < KERNELS; i++) {
        PyObject *name = PyUnicode_FromString(kernels[i].name);
        if (!name || PyTuple_SetItem(names, i, name) < 0) {
            Py_DECREF(names);
            return -1;
        }
    }
    if (PyModule_AddObject(module, "KERNELS", names) < 0) {
        Py_DECREF(names);
        return -1;
    }
    PyObject *type = PyType_FromModuleAndSpec(module, &crossing_spec, NULL);
    if (!type || PyModule_AddObject(module, "Crossing", type) < 0) {
        Py_XDECREF(type);
        return -1;
    }
    if (PyModule_AddIntConstant(module, "EDITION", EDITION) < 0)
        return -1;
    return PyModule_AddIntConstant(module, "MOST_ROWS", MOST_ROWS);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_native", .m_methods = functions, .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
