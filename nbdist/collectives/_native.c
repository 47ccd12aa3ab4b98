/* Reductions in shared memory between the ranks of one host, and the flight recorder. A
 * call runs from its first to its last step without the interpreter.
 *
 * Where this file is not compiled, `sync/semaphore_barrier.py`,
 * `transports/shared_memory.py` and `flight_recorder.py` do the same in Python on the
 * same memory.
 *
 * No argument from Python is used as an address. A Barrier and a Recorder map their
 * memory from a descriptor. The address of a tensor comes from the tensor, after a check of its type,
 * device, dtype, size and layout.
 */
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <sched.h>
#include <semaphore.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

#define EDITION 5 /* of the interface to Python: raise it together with native.py's */
#define MOST_RANKS 64
#define LINE_BYTES 64
#define SHARE_ELEMENTS 64 /* shares start at multiples of this, as in slots.py */
#define LONG_BYTES 32768  /* larger calls release the GIL */
#define CHUNK_BYTES 8192
#define MOST_PLANS 512
#define HEAD_BYTES 64    /* of a flight record, as in ipc/flight_record.py */
#define TEXT_BYTES 180   /* of one call in it */
#define MOST_PASSED 16   /* calls under way that are not overwritten */

/* The monotonic clock, or else the wall clock. If the wall clock is set back during a
 * wait, the wait lasts longer. */
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 30)
#define WAIT_CLOCK CLOCK_MONOTONIC
#define WAIT(semaphore, until) sem_clockwait(semaphore, CLOCK_MONOTONIC, until)
#else
#define WAIT_CLOCK CLOCK_REALTIME
#define WAIT(semaphore, until) sem_timedwait(semaphore, until)
#endif

static PyObject *name_dtype, *name_is_cpu, *name_nbytes, *name_is_contiguous,
    *name_is_neg, *name_data_ptr, *name_shape;
static PyObject *torch, *tensor_type, *parameter_type;

/* -- Barrier: each rank posts to each other rank, and waits for each of them ----------- */

typedef struct {
    PyObject_HEAD
    char *memory;            /* the segment; its first word says which rank has left */
    unsigned long long step; /* number of times that this rank has passed the barrier */
    char stopped;            /* set by Python to end this wait and all later ones */
    char busy;               /* a call that uses this barrier is under way */
    Py_ssize_t holds;        /* calls queued or running in Python */
    Py_ssize_t waiting_for;  /* index of the first peer that has not arrived */
    Py_ssize_t rank, size;
    int spins, yields;
    long nap_ns;
    size_t bytes; /* of the segment */
    char *semaphores, *slots;
    size_t slot_bytes;
} Barrier;

static int64_t *
fingerprint_of(const Barrier *self, Py_ssize_t rank)
{
    Py_ssize_t parity = self->step & 1;
    return (int64_t *)(self->memory + LINE_BYTES * (1 + parity * self->size + rank));
}

static sem_t *
semaphore_of(const Barrier *self, Py_ssize_t source, Py_ssize_t target)
{
    return (sem_t *)(self->semaphores + LINE_BYTES * (target * self->size + source));
}

/* The slot of a rank at an even or odd step. Slot `size` is the result's. */
static char *
slot_of(const Barrier *self, unsigned long long step, Py_ssize_t rank)
{
    return self->slots + ((step & 1) * (self->size + 1) + rank) * self->slot_bytes;
}

static Py_ssize_t
peer_at(const Barrier *self, Py_ssize_t index)
{
    return index < self->rank ? index : index + 1;
}

static int
barrier_init(Barrier *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"descriptor", "rank",   "size",   "slots_at", "slot_bytes",
                            "spins",      "yields", "nap_s", NULL};
    int descriptor, spins, yields;
    Py_ssize_t rank, size, slots_at, slot_bytes;
    double nap_s;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "innnniid", names, &descriptor, &rank,
                                     &size, &slots_at, &slot_bytes, &spins, &yields,
                                     &nap_s))
        return -1;
    if (self->memory) {
        PyErr_SetString(PyExc_RuntimeError, "this barrier is already initialised");
        return -1;
    }
    if (size < 1 || size > MOST_RANKS || rank < 0 || rank >= size) {
        PyErr_Format(PyExc_ValueError, "rank %zd of %zd: at most %d", rank, size,
                     MOST_RANKS);
        return -1;
    }
    if (!(nap_s >= 0 && nap_s <= 1)) {
        PyErr_SetString(PyExc_ValueError, "nap_s: expected 0 to 1 seconds");
        return -1;
    }
    size_t fingerprints_end = LINE_BYTES * (2 * (size_t)size + 1);
    size_t head = fingerprints_end + LINE_BYTES * (size_t)size * (size_t)size;
    size_t slots = 2 * ((size_t)size + 1);
    if (slots_at < 0 || (size_t)slots_at < head || slots_at % LINE_BYTES ||
        slot_bytes < 0 || slot_bytes % (LINE_BYTES * size) ||
        (size_t)slot_bytes > (SIZE_MAX / 2 - (size_t)slots_at) / slots) {
        PyErr_SetString(PyExc_ValueError, "the slots overlap or are not aligned");
        return -1;
    }
    size_t bytes = (size_t)slots_at + slots * (size_t)slot_bytes;
    struct stat status;
    if (fstat(descriptor, &status) || status.st_size < 0 ||
        (uint64_t)status.st_size < bytes) {
        PyErr_Format(PyExc_ValueError, "descriptor %d: expected a file of %zu bytes",
                     descriptor, bytes);
        return -1;
    }
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (memory == MAP_FAILED) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    self->memory = memory;
    self->bytes = bytes;
    self->semaphores = self->memory + fingerprints_end;
    self->slots = self->memory + slots_at;
    self->slot_bytes = (size_t)slot_bytes;
    self->rank = rank;
    self->size = size;
    self->spins = spins;
    self->yields = yields;
    self->nap_ns = (long)(nap_s * 1e9);
    return 0;
}

static void
barrier_dealloc(Barrier *self)
{
    if (self->memory)
        munmap(self->memory, self->bytes);
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* Marks the barrier as in use. Returns false, with an error set, if it is in use. */
static bool
enter(Barrier *self)
{
    if (!self->memory || self->busy) {
        PyErr_SetString(PyExc_RuntimeError,
                        self->memory ? "another call uses this barrier"
                                     : "this barrier is not initialised");
        return false;
    }
    self->busy = 1;
    return true;
}

/* Whether the semaphore could be taken. Spins, then yields, then sleeps once. */
static bool
take(const Barrier *self, sem_t *semaphore, bool may_sleep)
{
    for (int i = 0; i <= self->spins; i++)
        if (sem_trywait(semaphore) == 0)
            return true;
    bool taken = false;
    Py_BEGIN_ALLOW_THREADS
    for (int i = 0; i < self->yields && !taken; i++) {
        sched_yield(); /* lets the awaited rank run, if ranks share cores */
        taken = sem_trywait(semaphore) == 0;
    }
    if (!taken && may_sleep) {
        struct timespec until;
        clock_gettime(WAIT_CLOCK, &until);
        until.tv_nsec += self->nap_ns;
        until.tv_sec += until.tv_nsec / 1000000000L;
        until.tv_nsec %= 1000000000L;
        taken = WAIT(semaphore, &until) == 0; /* a signal ends the wait, too */
    }
    Py_END_ALLOW_THREADS
    return taken;
}

/* Writes the fingerprint, and posts to each other rank. */
static void
post(Barrier *self, int64_t fingerprint)
{
    *fingerprint_of(self, self->rank) = fingerprint;
    for (Py_ssize_t i = 0; i < self->size - 1; i++)
        sem_post(semaphore_of(self, self->rank, peer_at(self, i)));
    self->waiting_for = 0;
}

typedef enum { LATE, DIFFERENT, AGREED } Arrival;

/* Whether a rank has left at this step or an earlier one. A rank that has left at a later
 * step has passed this one, so all ranks have arrived here. `closing_word` in
 * semaphore_barrier.py makes the word. */
static bool
lacks_a_rank(const Barrier *self)
{
    int64_t left = *(volatile int64_t *)self->memory;
    return left && (unsigned long long)(left - 1) / self->size <= self->step;
}

/* LATE: a rank has not arrived, or a rank has left, or this barrier was stopped. */
static Arrival
await(Barrier *self, bool may_sleep)
{
    while (self->waiting_for < self->size - 1) {
        Py_ssize_t peer = peer_at(self, self->waiting_for);
        if (!take(self, semaphore_of(self, peer, self->rank), may_sleep))
            return LATE;
        self->waiting_for++;
    }
    if (self->stopped || lacks_a_rank(self))
        return LATE;
    int64_t own = *fingerprint_of(self, self->rank);
    bool agreed = true;
    for (Py_ssize_t rank = 0; rank < self->size; rank++)
        agreed &= *fingerprint_of(self, rank) == own;
    self->step++;
    return agreed ? AGREED : DIFFERENT;
}

/* True: all ranks have arrived with the same fingerprint. False: with different ones.
 * None: LATE. */
static PyObject *
barrier_resume(Barrier *self, PyObject *Py_UNUSED(none))
{
    if (!enter(self))
        return NULL;
    Arrival arrival = await(self, true);
    self->busy = 0;
    if (arrival == LATE)
        Py_RETURN_NONE;
    return PyBool_FromLong(arrival == AGREED);
}

static PyObject *
barrier_arrive(Barrier *self, PyObject *fingerprint)
{
    long long value = PyLong_AsLongLong(fingerprint);
    if ((value == -1 && PyErr_Occurred()) || !enter(self))
        return NULL;
    post(self, value);
    self->busy = 0;
    return barrier_resume(self, NULL);
}

static PyMethodDef barrier_methods[] = {
    {"arrive", (PyCFunction)barrier_arrive, METH_O, NULL},
    {"resume", (PyCFunction)barrier_resume, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef barrier_members[] = {
    {"step", T_ULONGLONG, offsetof(Barrier, step), READONLY, NULL},
    {"stopped", T_BOOL, offsetof(Barrier, stopped), 0, NULL},
    {"waiting_for", T_PYSSIZET, offsetof(Barrier, waiting_for), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot barrier_slots[] = {
    {Py_tp_init, barrier_init},
    {Py_tp_dealloc, barrier_dealloc},
    {Py_tp_methods, barrier_methods},
    {Py_tp_members, barrier_members},
    {0, NULL},
};

static PyType_Spec barrier_spec = {
    .name = "nbdist.collectives._native.Barrier",
    .basicsize = sizeof(Barrier),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = barrier_slots,
};

/* -- kernels --------------------------------------------------------------------------- */

typedef void (*Kernel)(void *out, void *const *rows, int count, size_t length);

/* Rows are combined in rank order, so that every rank gets the same bits. */
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
/* Integers are added and multiplied as unsigned, so that they wrap as torch's do. */
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

/* Reduces each chunk of all rows in a buffer that fits the L1 cache, and copies the
 * buffer to all outs. An out may therefore be one of the rows. */
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

/* -- tensors --------------------------------------------------------------------------- */

typedef struct {
    PyObject *dtype;
    size_t bytes;
} Kind;

static int
is_true(PyObject *found)
{
    if (!found)
        return -1;
    int truth = PyObject_IsTrue(found);
    Py_DECREF(found);
    return truth;
}

static int
ask(PyObject *tensor, PyObject *method)
{
    return is_true(PyObject_CallMethodObjArgs(tensor, method, NULL));
}

/* 1, and the address, for a dense tensor in host memory. 0 for any other object, and for
 * a tensor without memory. -1 with an error set. */
static int
memory_of(PyObject *tensor, size_t bytes, char **address)
{
    int answer = is_true(PyObject_GetAttr(tensor, name_is_cpu));
    if (answer < 1)
        return answer;
    if ((answer = ask(tensor, name_is_contiguous)) < 1)
        return answer;
    if ((answer = ask(tensor, name_is_neg)))
        return answer < 0 ? answer : 0;
    PyObject *pointer = PyObject_CallMethodObjArgs(tensor, name_data_ptr, NULL);
    if (!pointer)
        return -1;
    *address = PyLong_AsVoidPtr(pointer);
    Py_DECREF(pointer);
    if (PyErr_Occurred())
        return -1;
    return *address || !bytes;
}

/* Subclasses are excluded: one may have no memory, or override the methods used. */
static bool
is_exact(PyObject *tensor)
{
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    return type == tensor_type || type == parameter_type;
}

/* As `memory_of`, for a tensor of this kind. */
static int
address_of(const Kind *kind, PyObject *tensor, char **address)
{
    if (!is_exact(tensor))
        return 0;
    PyObject *dtype = PyObject_GetAttr(tensor, name_dtype);
    if (!dtype)
        return -1;
    Py_DECREF(dtype); /* equal dtypes are one object */
    if (dtype != kind->dtype)
        return 0;
    PyObject *bytes = PyObject_GetAttr(tensor, name_nbytes);
    if (!bytes)
        return -1;
    size_t size = PyLong_AsSize_t(bytes);
    Py_DECREF(bytes);
    if (PyErr_Occurred())
        return -1;
    return size == kind->bytes ? memory_of(tensor, size, address) : 0;
}

/* 0 for a tensor whose methods raise, such as a sparse one. */
static int
forgive(int found)
{
    if (found >= 0 || !PyErr_ExceptionMatches(PyExc_RuntimeError))
        return found;
    PyErr_Clear();
    return 0;
}

static int
examine(const Kind *kind, PyObject *tensor, char **address)
{
    return forgive(address_of(kind, tensor, address));
}

/* Whether `object` is an initialised instance of another type of this module. The first
 * field of an initialised one is not NULL. */
static bool
has_made(void *self, const char *name, PyObject *object)
{
    PyObject *module = PyType_GetModule(Py_TYPE((PyObject *)self));
    PyObject *type = module ? PyObject_GetAttrString(module, name) : NULL;
    int is_instance = type ? PyObject_IsInstance(object, type) : -1;
    Py_XDECREF(type);
    if (is_instance == 1 && *(void **)((char *)object + sizeof(PyObject)))
        return true;
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_TypeError, "expected a %s", name);
    return false;
}

/* -- Reduction: one operation on one kind of tensor ------------------------------------ */

typedef enum { ALL_REDUCE, REDUCE, REDUCE_SCATTER, OPERATIONS } Operation;

typedef struct {
    PyObject_HEAD
    Barrier *barrier;
    Kind kind; /* of the output, and of each input */
    Py_ssize_t kernel;
    Operation operation;
    Py_ssize_t root; /* of REDUCE */
    size_t length, itemsize, block, share;
    bool at_once;
    /* The call under way: */
    bool under_way, differs, inside; /* inside: a thread is in `advance` or `begin` */
    size_t phase; /* number of times that the barrier was passed */
    unsigned long long first_step;
    char *output;
    char *inputs[MOST_RANKS]; /* of REDUCE_SCATTER */
    PyObject *held;           /* the tensors */
} Reduction;

typedef struct {
    size_t start, size; /* of a block of the tensor, in bytes */
    size_t low, high;   /* of this rank's share of it, counted from `start` */
} Block;

static size_t
least(size_t a, size_t b)
{
    return a < b ? a : b;
}

static size_t
block_count(const Reduction *self)
{
    return self->length ? (self->length + self->block - 1) / self->block : 1;
}

static Block
block_at(const Reduction *self, size_t index)
{
    size_t start = index * self->block, length = least(self->block, self->length - start);
    size_t ranks = (size_t)self->barrier->size, rank = (size_t)self->barrier->rank;
    size_t lines = (length + ranks * SHARE_ELEMENTS - 1) / (ranks * SHARE_ELEMENTS);
    size_t share = lines * SHARE_ELEMENTS;
    size_t low = least(rank * share, length), high = least((rank + 1) * share, length);
    if (low == high) /* this rank has no share of it */
        low = high = length;
    size_t each = self->itemsize;
    return (Block){start * each, length * each, low * each, high * each};
}

static int
reduction_init(Reduction *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"barrier",       "operation", "kernel", "length",
                            "at_once_bytes", "root",      NULL};
    PyObject *barrier;
    int operation;
    Py_ssize_t kernel, length, at_once_bytes, root;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Oinnnn", names, &barrier, &operation,
                                     &kernel, &length, &at_once_bytes, &root))
        return -1;
    if (self->barrier) {
        PyErr_SetString(PyExc_RuntimeError, "this reduction is already initialised");
        return -1;
    }
    if (!has_made(self, "Barrier", barrier))
        return -1;
    Barrier *made = (Barrier *)barrier;
    if (kernel < 0 || kernel >= KERNELS || operation < 0 || operation >= OPERATIONS ||
        length < 0 || at_once_bytes < 0 || (size_t)at_once_bytes > made->slot_bytes ||
        root < 0 || root >= made->size) {
        PyErr_SetString(PyExc_ValueError, "unknown operation, kernel, length, size or root");
        return -1;
    }
    size_t itemsize = kernels[kernel].itemsize;
    size_t parts = operation == REDUCE_SCATTER ? (size_t)made->size : 1;
    size_t block = made->slot_bytes / parts / itemsize;
    if (!block || (size_t)length > SIZE_MAX / 2 / itemsize) {
        PyErr_SetString(PyExc_ValueError, "tensor too long, or slots too small");
        return -1;
    }
    PyObject *dtype = PyObject_GetAttrString(torch, strchr(kernels[kernel].name, ' ') + 1);
    if (!dtype)
        return -1;
    Py_INCREF(barrier);
    self->barrier = made;
    self->kind = (Kind){dtype, (size_t)length * itemsize};
    self->kernel = kernel;
    self->operation = (Operation)operation;
    self->root = root;
    self->length = (size_t)length;
    self->itemsize = itemsize;
    self->block = block;
    self->at_once = self->kind.bytes <= (size_t)at_once_bytes;
    return 0;
}

static void
reduction_dealloc(Reduction *self)
{
    if (self->under_way)
        self->barrier->busy = 0;
    Py_XDECREF(self->held);
    Py_XDECREF(self->kind.dtype);
    Py_XDECREF((PyObject *)self->barrier);
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* Copies a block except this rank's share. */
static void
copy_others(const Block *block, char *target, const char *source)
{
    memcpy(target, source, block->low);
    memcpy(target + block->high, source + block->high, block->size - block->high);
}

/* Whether this rank's tensor receives the result. */
static bool
is_wanted(const Reduction *self)
{
    return self->operation != REDUCE || self->root == self->barrier->rank;
}

/* The piece of a rank's slot for another rank. */
static char *
piece_of(const Reduction *self, unsigned long long step, Py_ssize_t source,
         Py_ssize_t target)
{
    const Barrier *barrier = self->barrier;
    size_t piece = barrier->slot_bytes / (size_t)barrier->size;
    return slot_of(barrier, step, source) + (size_t)target * piece;
}

/* Copies block `index` of this rank's tensors into its slot. */
static void
show(const Reduction *self, size_t index)
{
    const Barrier *barrier = self->barrier;
    const Block block = block_at(self, index);
    unsigned long long step = self->first_step + index;
    if (!block.size)
        return; /* an empty tensor has no address */
    if (self->operation == REDUCE_SCATTER) {
        for (Py_ssize_t rank = 0; rank < barrier->size; rank++)
            if (rank != barrier->rank)
                memcpy(piece_of(self, step, barrier->rank, rank),
                       self->inputs[rank] + block.start, block.size);
        return;
    }
    char *slot = slot_of(barrier, step, barrier->rank);
    if (self->at_once)
        memcpy(slot, self->output, block.size);
    else
        copy_others(&block, slot, self->output + block.start);
}

/* Copies the other ranks' results of block `index` into this rank's tensor. */
static void
collect(const Reduction *self, size_t index)
{
    const Block block = block_at(self, index);
    const char *results =
        slot_of(self->barrier, self->first_step + index, self->barrier->size);
    if (is_wanted(self))
        copy_others(&block, self->output + block.start, results);
}

/* Reduces this rank's share of block `index` from all rows into its tensor, and into the
 * result's slot for the other ranks. */
static void
combine(const Reduction *self, size_t index)
{
    const Barrier *barrier = self->barrier;
    const Block block = block_at(self, index);
    unsigned long long step = self->first_step + index;
    char *rows[MOST_RANKS], *outs[2];
    Py_ssize_t out_count = 0;
    size_t bytes = block.size;
    for (Py_ssize_t rank = 0; rank < barrier->size; rank++)
        rows[rank] = slot_of(barrier, step, rank);
    if (self->operation == REDUCE_SCATTER) {
        for (Py_ssize_t rank = 0; rank < barrier->size; rank++)
            rows[rank] = piece_of(self, step, rank, barrier->rank);
        rows[barrier->rank] = self->inputs[barrier->rank] + block.start;
        outs[out_count++] = self->output + block.start;
    } else if (self->at_once) {
        if (is_wanted(self))
            outs[out_count++] = self->output;
    } else {
        for (Py_ssize_t rank = 0; rank < barrier->size; rank++)
            rows[rank] += block.low;
        rows[barrier->rank] = self->output + block.start + block.low;
        if (is_wanted(self))
            outs[out_count++] = rows[barrier->rank];
        outs[out_count++] = slot_of(barrier, step, barrier->size) + block.low;
        bytes = block.high - block.low;
    }
    if (out_count)
        reduce_chunks(self->kernel, outs, out_count, rows, barrier->size,
                      bytes / self->itemsize);
}

/* The work after the barrier was passed. Returns whether the call is done. */
static bool
work(const Reduction *self)
{
    size_t blocks = block_count(self), phase = self->phase;
    bool direct = self->at_once || self->operation == REDUCE_SCATTER;
    if (phase < blocks)
        combine(self, phase);
    if (!direct && phase)
        collect(self, phase - 1);
    if (phase + 1 < blocks)
        show(self, phase + 1);
    return phase + (direct ? 1 : 0) >= blocks;
}

static PyObject *
end(Reduction *self, bool agreed)
{
    PyObject *held = self->held;
    self->under_way = self->differs = false;
    self->held = NULL;
    self->barrier->busy = 0;
    Py_XDECREF(held);
    return PyBool_FromLong(agreed);
}

static PyObject *
advance_inside(Reduction *self, bool may_sleep)
{
    bool is_long = self->kind.bytes >= LONG_BYTES, done = false;
    while (!done) {
        Arrival arrival = await(self->barrier, may_sleep);
        if (arrival == LATE)
            Py_RETURN_NONE;
        if (arrival == DIFFERENT && !self->phase) {
            if (may_sleep)
                return end(self, false);
            self->differs = true; /* `resume` returns False */
            Py_RETURN_NONE;
        }
        if (is_long) {
            Py_BEGIN_ALLOW_THREADS
            done = work(self);
            Py_END_ALLOW_THREADS
        } else {
            done = work(self);
        }
        if (!done) {
            self->phase++;
            post(self->barrier, 0);
        }
    }
    return end(self, true);
}

/* True: done. False: fingerprints differ, and no data was touched. None: LATE. */
static PyObject *
advance(Reduction *self, bool may_sleep)
{
    if (self->differs)
        return end(self, false);
    self->inside = true;
    PyObject *outcome = advance_inside(self, may_sleep);
    self->inside = false;
    return outcome;
}

/* Steals the reference to `held`. */
static PyObject *
begin(Reduction *self, int64_t fingerprint, PyObject *held, bool may_sleep)
{
    if (!enter(self->barrier)) {
        Py_DECREF(held);
        return NULL;
    }
    self->held = held;
    self->under_way = true;
    self->inside = true;
    self->phase = 0;
    self->first_step = self->barrier->step;
    if (self->kind.bytes >= LONG_BYTES) {
        Py_BEGIN_ALLOW_THREADS
        show(self, 0);
        Py_END_ALLOW_THREADS
    } else {
        show(self, 0);
    }
    post(self->barrier, fingerprint);
    return advance(self, may_sleep);
}

static bool
is_ready(const Reduction *self, bool scatters)
{
    if (self->barrier && (self->operation == REDUCE_SCATTER) == scatters)
        return true;
    PyErr_SetString(PyExc_RuntimeError, "this reduction is for another operation");
    return false;
}

/* run(tensor, fingerprint): returns what `advance` returns; NotImplemented if the tensor
 * is not of this kind, and no call was started. */
static PyObject *
reduction_run(Reduction *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "run(tensor, fingerprint)");
        return NULL;
    }
    long long fingerprint = PyLong_AsLongLong(args[1]);
    if ((fingerprint == -1 && PyErr_Occurred()) || !is_ready(self, false))
        return NULL;
    char *address;
    int found = examine(&self->kind, args[0], &address);
    if (found < 0)
        return NULL;
    if (!found)
        Py_RETURN_NOTIMPLEMENTED;
    if (self->barrier->busy) { /* `output` belongs to the call under way */
        enter(self->barrier);
        return NULL;
    }
    self->output = address;
    Py_INCREF(args[0]);
    return begin(self, fingerprint, args[0], true);
}

/* run_lists(output, inputs, fingerprint): the same as `run`, for a reduce-scatter. */
static PyObject *
reduction_run_lists(Reduction *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "run_lists(output, inputs, fingerprint)");
        return NULL;
    }
    long long fingerprint = PyLong_AsLongLong(args[2]);
    if ((fingerprint == -1 && PyErr_Occurred()) || !is_ready(self, true))
        return NULL;
    PyObject *inputs = PySequence_Tuple(args[1]);
    if (!inputs)
        return NULL;
    char *addresses[MOST_RANKS], *output;
    Py_ssize_t ranks = self->barrier->size;
    int found = PyTuple_Size(inputs) == ranks && examine(&self->kind, args[0], &output);
    for (Py_ssize_t rank = 0; found == 1 && rank < ranks; rank++)
        found = examine(&self->kind, PyTuple_GetItem(inputs, rank), &addresses[rank]);
    if (found < 1 || self->barrier->busy) {
        Py_DECREF(inputs);
        if (found < 0)
            return NULL;
        if (!found)
            Py_RETURN_NOTIMPLEMENTED;
        enter(self->barrier);
        return NULL;
    }
    self->output = output;
    memcpy(self->inputs, addresses, sizeof addresses[0] * (size_t)ranks);
    PyObject *held = PyTuple_Pack(2, args[0], inputs);
    Py_DECREF(inputs);
    return held ? begin(self, fingerprint, held, true) : NULL;
}

/* Continues a call that has returned None. */
static PyObject *
reduction_resume(Reduction *self, PyObject *Py_UNUSED(none))
{
    if (!self->under_way || self->inside) {
        PyErr_SetString(PyExc_RuntimeError, "no call of this reduction is waiting");
        return NULL;
    }
    return advance(self, true);
}

static PyMethodDef reduction_methods[] = {
    {"run", (PyCFunction)(void (*)(void))reduction_run, METH_FASTCALL, NULL},
    {"run_lists", (PyCFunction)(void (*)(void))reduction_run_lists, METH_FASTCALL, NULL},
    {"resume", (PyCFunction)reduction_resume, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot reduction_slots[] = {
    {Py_tp_init, reduction_init},
    {Py_tp_dealloc, reduction_dealloc},
    {Py_tp_methods, reduction_methods},
    {0, NULL},
};

static PyType_Spec reduction_spec = {
    .name = "nbdist.collectives._native.Reduction",
    .basicsize = sizeof(Reduction),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = reduction_slots,
};

/* -- Recorder: the last calls of this process, in a file that outlives it -------------- */

enum { SCHEDULED = 1, RUNNING, DONE, FAILED };

typedef struct {
    uint64_t commit; /* the call's ticket; 0 while the entry is written */
    uint64_t sequence;
    int64_t fingerprint;
    int64_t scheduled_ns, started_ns, ended_ns;
    uint32_t state, group, generation;
    int32_t rank, cell, line;
    uint16_t length, unused; /* bytes of the whole text */
    char text[TEXT_BYTES];
} Entry;

typedef struct {
    char magic[8];
    uint64_t last; /* the ticket given last; a ticket's entry is at ticket % count */
    int64_t clock_offset_ns;
    uint32_t count, pid;
} Head;

_Static_assert(sizeof(Entry) == 256 && sizeof(Head) <= HEAD_BYTES, "flight_record.py");

typedef struct {
    PyObject_HEAD
    Head *head;
    Entry *entries;
    uint32_t count;
} Recorder;

static int
recorder_init(Recorder *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"descriptor", "count", NULL};
    int descriptor;
    unsigned int count;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iI", names, &descriptor, &count))
        return -1;
    if (self->head) {
        PyErr_SetString(PyExc_RuntimeError, "this recorder is already initialised");
        return -1;
    }
    size_t bytes = HEAD_BYTES + (size_t)count * sizeof(Entry);
    struct stat status;
    if (!count || fstat(descriptor, &status) || status.st_size < 0 ||
        (uint64_t)status.st_size < bytes) {
        PyErr_Format(PyExc_ValueError, "descriptor %d: expected a file of %zu bytes",
                     descriptor, bytes);
        return -1;
    }
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (memory == MAP_FAILED) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    self->head = memory;
    self->entries = (Entry *)((char *)memory + HEAD_BYTES);
    self->count = count;
    return 0;
}

static void
recorder_dealloc(Recorder *self)
{
    if (self->head)
        munmap(self->head, HEAD_BYTES + (size_t)self->count * sizeof(Entry));
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyType_Slot recorder_slots[] = {
    {Py_tp_init, recorder_init},
    {Py_tp_dealloc, recorder_dealloc},
    {0, NULL},
};

static PyType_Spec recorder_spec = {
    .name = "nbdist.collectives._native.Recorder",
    .basicsize = sizeof(Recorder),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = recorder_slots,
};

static int64_t
now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* The ticket of the next call. Calls that are under way keep their entries, except if
 * many of them follow each other. */
static uint64_t
next_ticket(Recorder *self)
{
    uint64_t ticket = self->head->last;
    for (int passed = 0; passed <= MOST_PASSED; passed++) {
        uint32_t state = self->entries[++ticket % self->count].state;
        if (state != SCHEDULED && state != RUNNING)
            break;
    }
    return self->head->last = ticket;
}

/* The entry of a call; NULL if a later call has overwritten it. */
static Entry *
entry_of(Recorder *self, uint64_t ticket)
{
    Entry *entry = &self->entries[ticket % self->count];
    return ticket && entry->commit == ticket ? entry : NULL;
}

/* -- CallLog: what one group writes to the recorder ------------------------------------ */

typedef struct {
    PyObject_HEAD
    Recorder *recorder;
    unsigned long long sequence; /* number of collectives started */
    unsigned int group, generation;
    int rank;
    size_t length; /* of the members */
    char members[TEXT_BYTES];
} CallLog;

static bool has_made(void *self, const char *name, PyObject *object);

static int
log_init(CallLog *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"recorder", "group", "generation", "rank", "members", NULL};
    PyObject *recorder, *given;
    unsigned int group, generation;
    int rank;
    char *members;
    Py_ssize_t length;
    /* Not "y#": built by Python 3.13, it does not work in older versions. */
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OIIiS", names, &recorder, &group,
                                     &generation, &rank, &given))
        return -1;
    if (PyBytes_AsStringAndSize(given, &members, &length) < 0)
        return -1;
    if (self->recorder) {
        PyErr_SetString(PyExc_RuntimeError, "this log is already initialised");
        return -1;
    }
    if (!has_made(self, "Recorder", recorder))
        return -1;
    Py_INCREF(recorder);
    self->recorder = (Recorder *)recorder;
    self->group = group;
    self->generation = generation;
    self->rank = rank;
    self->length = (size_t)length < TEXT_BYTES ? (size_t)length : TEXT_BYTES;
    memcpy(self->members, members, self->length);
    return 0;
}

static void
log_dealloc(CallLog *self)
{
    Py_XDECREF((PyObject *)self->recorder);
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static bool
is_open(const CallLog *self)
{
    if (!self->recorder)
        PyErr_SetString(PyExc_RuntimeError, "this log is not initialised");
    return self->recorder;
}

typedef struct {
    const char *text;
    Py_ssize_t length;
    long long fingerprint;
} CallKind;

/* Writes the entry of a new call, and returns its ticket. A process that is killed here
 * leaves an entry whose `commit` is 0. */
static uint64_t
write_entry(CallLog *self, const CallKind *kind, uint32_t state, uint64_t sequence)
{
    uint64_t ticket = next_ticket(self->recorder);
    Entry *entry = &self->recorder->entries[ticket % self->recorder->count];
    __atomic_store_n(&entry->commit, 0, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    entry->sequence = sequence;
    entry->fingerprint = kind->fingerprint;
    entry->scheduled_ns = entry->started_ns = now_ns();
    entry->ended_ns = 0;
    entry->state = state;
    entry->group = self->group;
    entry->generation = self->generation;
    entry->rank = self->rank;
    entry->cell = entry->line = 0;
    size_t whole = self->length + (size_t)kind->length, room = TEXT_BYTES - self->length;
    entry->length = whole < UINT16_MAX ? (uint16_t)whole : UINT16_MAX;
    memcpy(entry->text, self->members, self->length);
    memcpy(entry->text + self->length, kind->text,
           (size_t)kind->length < room ? (size_t)kind->length : room);
    __atomic_store_n(&entry->commit, ticket, __ATOMIC_RELEASE);
    return ticket;
}

static uint64_t
write_started(CallLog *self, const CallKind *kind)
{
    return write_entry(self, kind, RUNNING, ++self->sequence);
}

static void
write_end(CallLog *self, uint64_t ticket, bool ok)
{
    Entry *entry = entry_of(self->recorder, ticket);
    if (!entry)
        return;
    entry->ended_ns = now_ns();
    __atomic_store_n(&entry->state, ok ? DONE : FAILED, __ATOMIC_RELEASE);
}

static bool
read_kind(PyObject *text, PyObject *fingerprint, CallKind *kind)
{
    char *bytes;
    kind->fingerprint = PyLong_AsLongLong(fingerprint);
    if ((kind->fingerprint == -1 && PyErr_Occurred()) ||
        PyBytes_AsStringAndSize(text, &bytes, &kind->length) < 0)
        return false;
    kind->text = bytes;
    return true;
}

/* Whether the log is open and got `count` arguments. */
static bool
has_arguments(const CallLog *self, Py_ssize_t got, Py_ssize_t count, const char *usage)
{
    if (got != count)
        PyErr_SetString(PyExc_TypeError, usage);
    return got == count && is_open(self);
}

static PyObject *
log_begin(CallLog *self, PyObject *const *args, Py_ssize_t count)
{
    CallKind kind;
    if (!has_arguments(self, count, 2, "begin(text, fingerprint)") ||
        !read_kind(args[0], args[1], &kind))
        return NULL;
    return PyLong_FromUnsignedLongLong(write_started(self, &kind));
}

static PyObject *
log_schedule(CallLog *self, PyObject *const *args, Py_ssize_t count)
{
    CallKind kind;
    if (!has_arguments(self, count, 2, "schedule(text, fingerprint)") ||
        !read_kind(args[0], args[1], &kind))
        return NULL;
    return PyLong_FromUnsignedLongLong(write_entry(self, &kind, SCHEDULED, 0));
}

static PyObject *
log_message(CallLog *self, PyObject *const *args, Py_ssize_t count)
{
    CallKind kind;
    if (!has_arguments(self, count, 3, "message(text, fingerprint, sequence)") ||
        !read_kind(args[0], args[1], &kind))
        return NULL;
    unsigned long long sequence = PyLong_AsUnsignedLongLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    return PyLong_FromUnsignedLongLong(write_entry(self, &kind, RUNNING, sequence));
}

static PyObject *
log_start(CallLog *self, PyObject *ticket)
{
    unsigned long long number = PyLong_AsUnsignedLongLong(ticket);
    if (PyErr_Occurred() || !is_open(self))
        return NULL;
    self->sequence++;
    Entry *entry = entry_of(self->recorder, number);
    if (entry) {
        entry->sequence = self->sequence;
        entry->started_ns = now_ns();
        __atomic_store_n(&entry->state, RUNNING, __ATOMIC_RELEASE);
    }
    Py_RETURN_NONE;
}

static PyObject *
log_locate(CallLog *self, PyObject *const *args, Py_ssize_t count)
{
    if (!has_arguments(self, count, 3, "locate(ticket, cell, line)"))
        return NULL;
    unsigned long long ticket = PyLong_AsUnsignedLongLong(args[0]);
    long cell = PyErr_Occurred() ? 0 : PyLong_AsLong(args[1]);
    long line = PyErr_Occurred() ? 0 : PyLong_AsLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    Entry *entry = entry_of(self->recorder, ticket);
    if (entry) {
        entry->cell = (int32_t)cell;
        entry->line = (int32_t)line;
    }
    Py_RETURN_NONE;
}

static PyObject *
log_end(CallLog *self, PyObject *const *args, Py_ssize_t count)
{
    if (!has_arguments(self, count, 2, "end(ticket, ok)"))
        return NULL;
    unsigned long long ticket = PyLong_AsUnsignedLongLong(args[0]);
    int ok = PyErr_Occurred() ? -1 : PyObject_IsTrue(args[1]);
    if (ok < 0)
        return NULL;
    write_end(self, ticket, ok);
    Py_RETURN_NONE;
}

#define FAST(FUNCTION) (PyCFunction)(void (*)(void))FUNCTION, METH_FASTCALL, NULL

static PyMethodDef log_methods[] = {
    {"begin", FAST(log_begin)},
    {"schedule", FAST(log_schedule)},
    {"message", FAST(log_message)},
    {"start", (PyCFunction)log_start, METH_O, NULL},
    {"locate", FAST(log_locate)},
    {"end", FAST(log_end)},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef log_members[] = {
    {"sequence", T_ULONGLONG, offsetof(CallLog, sequence), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot log_slots[] = {
    {Py_tp_init, log_init},       {Py_tp_dealloc, log_dealloc},
    {Py_tp_methods, log_methods}, {Py_tp_members, log_members},
    {0, NULL},
};

static PyType_Spec log_spec = {
    .name = "nbdist.collectives._native.CallLog",
    .basicsize = sizeof(CallLog),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = log_slots,
};

/* -- QuickCalls: the all-reduces of a group in which no rank is late ------------------- */

typedef struct {
    PyObject_HEAD
    Barrier *barrier;
    CallLog *log;
    PyObject *plans;           /* {(op, dtype, shape): (Reduction, fingerprint, text)} */
    unsigned long long ticket; /* of the last call in the log */
    Reduction *waiting;        /* the one whose call is under way */
} QuickCalls;

static int
quick_init(QuickCalls *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"barrier", "log", NULL};
    PyObject *barrier, *log;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO", names, &barrier, &log))
        return -1;
    if (self->barrier) {
        PyErr_SetString(PyExc_RuntimeError, "these quick calls are already initialised");
        return -1;
    }
    if (!has_made(self, "Barrier", barrier) || !has_made(self, "CallLog", log) ||
        (!self->plans && !(self->plans = PyDict_New())))
        return -1;
    Py_INCREF(barrier);
    Py_INCREF(log);
    self->log = (CallLog *)log;
    self->barrier = (Barrier *)barrier;
    return 0;
}

static void
quick_dealloc(QuickCalls *self)
{
    Py_XDECREF(self->plans);
    Py_XDECREF((PyObject *)self->waiting);
    Py_XDECREF((PyObject *)self->log);
    Py_XDECREF((PyObject *)self->barrier);
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static bool
is_made(const QuickCalls *self)
{
    if (!self->barrier)
        PyErr_SetString(PyExc_RuntimeError, "these quick calls are not initialised");
    return self->barrier;
}

/* keep(op, shape, reduction, fingerprint, text): makes `all_reduce` use the reduction for
 * tensors of this shape and of the reduction's dtype. The text is for the log. */
static PyObject *
quick_keep(QuickCalls *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 5 || !is_made(self) || !PyTuple_Check(args[1]) ||
        !PyBytes_Check(args[4]) || !has_made(self, "Reduction", args[2])) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError,
                            "keep(op, shape, reduction, fingerprint, text)");
        return NULL;
    }
    const Reduction *reduction = (Reduction *)args[2];
    size_t length = 1;
    for (Py_ssize_t i = 0; i < PyTuple_Size(args[1]); i++) {
        size_t extent = PyLong_AsSize_t(PyTuple_GetItem(args[1], i));
        if (PyErr_Occurred())
            return NULL;
        if (extent && length > SIZE_MAX / extent) {
            PyErr_SetString(PyExc_ValueError, "the shape has too many elements");
            return NULL;
        }
        length *= extent;
    }
    if (reduction->barrier != self->barrier || reduction->operation != ALL_REDUCE ||
        reduction->length != length) {
        PyErr_SetString(PyExc_ValueError, "the reduction is for other tensors");
        return NULL;
    }
    long long fingerprint = PyLong_AsLongLong(args[3]);
    if (fingerprint == -1 && PyErr_Occurred())
        return NULL;
    if (PyDict_Size(self->plans) >= MOST_PLANS) /* shapes may never repeat */
        PyDict_Clear(self->plans);
    PyObject *key = PyTuple_Pack(3, args[0], reduction->kind.dtype, args[1]);
    PyObject *plan = PyTuple_Pack(3, args[2], args[3], args[4]);
    int kept = key && plan ? PyDict_SetItem(self->plans, key, plan) : -1;
    Py_XDECREF(key);
    Py_XDECREF(plan);
    if (kept < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* A new reference to the plan for a tensor. NULL: no plan, or an error is set. */
static PyObject *
plan_for(const QuickCalls *self, PyObject *tensor, PyObject *op)
{
    PyObject *dtype = PyObject_GetAttr(tensor, name_dtype);
    PyObject *shape = dtype ? PyObject_GetAttr(tensor, name_shape) : NULL;
    PyObject *key = shape ? PyTuple_Pack(3, op, dtype, shape) : NULL;
    PyObject *plan = key ? PyDict_GetItemWithError(self->plans, key) : NULL;
    Py_XINCREF(plan);
    Py_XDECREF(key);
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    return plan;
}

/* all_reduce(tensor, op): True if it is done. False if no call was started. None if a
 * rank is late: the caller calls `resume` until the call has ended, then `release`. */
static PyObject *
quick_all_reduce(QuickCalls *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "all_reduce(tensor, op)");
        return NULL;
    }
    PyObject *tensor = args[0];
    if (!is_made(self))
        return NULL;
    if (!is_exact(tensor))
        Py_RETURN_FALSE;
    PyObject *plan = plan_for(self, tensor, args[1]);
    if (!plan) {
        if (forgive(PyErr_Occurred() ? -1 : 0) < 0)
            return NULL;
        Py_RETURN_FALSE;
    }
    Reduction *reduction = (Reduction *)PyTuple_GetItem(plan, 0);
    CallKind kind;
    if (!read_kind(PyTuple_GetItem(plan, 2), PyTuple_GetItem(plan, 1), &kind)) {
        Py_DECREF(plan);
        return NULL;
    }
    char *address;
    int found = forgive(memory_of(tensor, reduction->kind.bytes, &address));
    const Barrier *barrier = self->barrier;
    bool free = !barrier->busy && !barrier->holds && !barrier->stopped &&
                !*(volatile int64_t *)barrier->memory;
    if (found < 1 || !free) {
        Py_DECREF(plan);
        return found < 0 ? NULL : PyBool_FromLong(0);
    }
    self->ticket = write_started(self->log, &kind);
    reduction->output = address;
    Py_INCREF(tensor);
    Py_INCREF((PyObject *)reduction);
    Py_DECREF(plan);
    PyObject *outcome = begin(reduction, kind.fingerprint, tensor, false);
    if (outcome == Py_True) {
        write_end(self->log, self->ticket, true);
        Py_DECREF((PyObject *)reduction);
        return outcome;
    }
    self->waiting = reduction;
    self->barrier->holds++; /* until Python has finished the call */
    return outcome;
}

/* Continues a call that has returned None. Returns what `Reduction.resume` returns. */
static PyObject *
quick_resume(QuickCalls *self, PyObject *Py_UNUSED(none))
{
    Reduction *waiting = self->waiting;
    if (!waiting || !waiting->under_way || waiting->inside) {
        PyErr_SetString(PyExc_RuntimeError, "no quick call is waiting");
        return NULL;
    }
    PyObject *outcome = advance(waiting, true);
    if (outcome != Py_None) {
        write_end(self->log, self->ticket, outcome == Py_True);
        self->waiting = NULL;
        Py_DECREF((PyObject *)waiting);
    }
    return outcome;
}

/* hold(): prevents calls from starting until `release`. False if a call is under way. */
static PyObject *
quick_hold(QuickCalls *self, PyObject *Py_UNUSED(none))
{
    if (!is_made(self))
        return NULL;
    if (self->waiting || (self->barrier->busy && !self->barrier->holds))
        Py_RETURN_FALSE;
    self->barrier->holds++;
    Py_RETURN_TRUE;
}

static PyObject *
quick_release(QuickCalls *self, PyObject *Py_UNUSED(none))
{
    if (!is_made(self))
        return NULL;
    if (self->barrier->holds > 0)
        self->barrier->holds--;
    Py_RETURN_NONE;
}

static PyMethodDef quick_methods[] = {
    {"keep", FAST(quick_keep)},
    {"all_reduce", FAST(quick_all_reduce)},
    {"resume", (PyCFunction)quick_resume, METH_NOARGS, NULL},
    {"hold", (PyCFunction)quick_hold, METH_NOARGS, NULL},
    {"release", (PyCFunction)quick_release, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef quick_members[] = {
    {"ticket", T_ULONGLONG, offsetof(QuickCalls, ticket), READONLY, NULL},
    {"waiting", T_OBJECT, offsetof(QuickCalls, waiting), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot quick_slots[] = {
    {Py_tp_init, quick_init},
    {Py_tp_dealloc, quick_dealloc},
    {Py_tp_methods, quick_methods},
    {Py_tp_members, quick_members},
    {0, NULL},
};

static PyType_Spec quick_spec = {
    .name = "nbdist.collectives._native.QuickCalls",
    .basicsize = sizeof(QuickCalls),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = quick_slots,
};

/* -- the module ------------------------------------------------------------------------ */

static bool
add_type(PyObject *module, PyType_Spec *spec, const char *name)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type && PyModule_AddObject(module, name, type) == 0)
        return true;
    Py_XDECREF(type);
    return false;
}

static bool
add_kernel_names(PyObject *module)
{
    PyObject *names = PyTuple_New(KERNELS);
    if (!names)
        return false;
    for (Py_ssize_t i = 0; i < KERNELS; i++) {
        PyObject *name = PyUnicode_FromString(kernels[i].name);
        if (!name || PyTuple_SetItem(names, i, name) < 0) {
            Py_DECREF(names);
            return false;
        }
    }
    if (PyModule_AddObject(module, "KERNELS", names) == 0)
        return true;
    Py_DECREF(names);
    return false;
}

static bool
find_types(void)
{
    if (tensor_type && parameter_type)
        return true;
    PyObject *modules = PyImport_ImportModule("torch.nn");
    torch = PyImport_ImportModule("torch");
    if (modules && torch) {
        tensor_type = PyObject_GetAttrString(torch, "Tensor");
        parameter_type = PyObject_GetAttrString(modules, "Parameter");
    }
    Py_XDECREF(modules);
    return tensor_type && parameter_type;
}

static int
fill(PyObject *module)
{
    struct {
        PyObject **place;
        const char *text;
    } names[] = {
        {&name_dtype, "dtype"},           {&name_is_cpu, "is_cpu"},
        {&name_nbytes, "nbytes"},         {&name_is_contiguous, "is_contiguous"},
        {&name_is_neg, "is_neg"},         {&name_data_ptr, "data_ptr"},
        {&name_shape, "shape"},
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (!*names[i].place &&
            !(*names[i].place = PyUnicode_InternFromString(names[i].text)))
            return -1;
    bool filled = find_types() && add_kernel_names(module) &&
                  add_type(module, &barrier_spec, "Barrier") &&
                  add_type(module, &reduction_spec, "Reduction") &&
                  add_type(module, &recorder_spec, "Recorder") &&
                  add_type(module, &log_spec, "CallLog") &&
                  add_type(module, &quick_spec, "QuickCalls") &&
                  PyModule_AddIntConstant(module, "EDITION", EDITION) == 0 &&
                  PyModule_AddIntConstant(module, "MOST_RANKS", MOST_RANKS) == 0 &&
                  PyModule_AddIntConstant(module, "ALL_REDUCE", ALL_REDUCE) == 0 &&
                  PyModule_AddIntConstant(module, "REDUCE", REDUCE) == 0 &&
                  PyModule_AddIntConstant(module, "REDUCE_SCATTER", REDUCE_SCATTER) == 0;
    return filled ? 0 : -1;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
