/* Keeps this process alive if another rank dies while Open MPI creates a communicator.
 *
 * When a process dies, Open MPI revokes the collectives of each communicator that it was
 * in. A communicator that is being created is among them already, but has no collectives
 * yet (`c_coll` is NULL until `mca_coll_base_comm_select`), and Open MPI 5.0 ends with
 * SIGSEGV (5.0.10: ompi_comm_revoke_local in ompi/communicator/ft/comm_ft_revoke.c). Here
 * the revocation waits until the communicator is complete.
 *
 * If a communicator of a spawn gets no number, because a process has died, Open MPI frees
 * MPI_COMM_NULL and ends with SIGABRT (5.0.10: ompi_comm_idup_with_info_activate in
 * ompi/communicator/comm.c). Here MPI_COMM_NULL stays.
 *
 * The functions below stand before Open MPI's functions of the same names, because this
 * library is loaded into the global scope before libmpi (ELF symbol interposition). If
 * libmpi has none of these names, is of another version than 5.0, or MPI was initialised
 * before, nothing changes.
 */
#define _GNU_SOURCE /* RTLD_NEXT */
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define REPLACES __attribute__((visibility("default")))

/* -- the communicators that are being created ----------------------------------------- */

typedef enum { NONE, COLLECTIVES, ALL } Revocation;

typedef struct Creation {
    void *comm;
    Revocation waiting; /* for the end of the creation */
    struct Creation *next;
} Creation;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Creation *creations;
static bool sees_ends; /* MPI_Init has completed its communicators through this file */

static Creation *
creation_of(const void *comm)
{
    Creation *found = creations;
    while (found != NULL && found->comm != comm) {
        found = found->next;
    }
    return found;
}

/* If there is no memory, the communicator is revoked at once, as without this file. */
static void
begin(void *comm)
{
    pthread_mutex_lock(&lock);
    Creation *known = creation_of(comm); /* it failed, and its address is used again */
    if (known == NULL && sees_ends && (known = malloc(sizeof *known)) != NULL) {
        known->comm = comm;
        known->next = creations;
        creations = known;
    }
    if (known != NULL) {
        known->waiting = NONE;
    }
    pthread_mutex_unlock(&lock);
}

static Revocation
end(const void *comm)
{
    Revocation waiting = NONE;
    pthread_mutex_lock(&lock);
    sees_ends = true;
    for (Creation **link = &creations; *link != NULL; link = &(*link)->next) {
        Creation *ended = *link;
        if (ended->comm == comm) {
            waiting = ended->waiting;
            *link = ended->next;
            free(ended);
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    return waiting;
}

static bool
must_wait(const void *comm, Revocation wanted)
{
    pthread_mutex_lock(&lock);
    Creation *creation = creation_of(comm);
    if (creation != NULL && creation->waiting < wanted) {
        creation->waiting = wanted;
    }
    pthread_mutex_unlock(&lock);
    return creation != NULL;
}

/* -- before Open MPI's functions ------------------------------------------------------ */

typedef int NextCid(void *, void *, void *, const void *, const void *, bool, int, void **);
typedef int Activate(void **, void *, void *, const void *, const void *, bool, int,
                     void **);
typedef int Select(void *);
typedef bool Revoke(void *, bool);
typedef int Version(char *, int *);

#define KNOWN "Open MPI v5.0."

/* Only libmpi calls the functions below, so it is loaded. */
static void *
open_mpi(const char *name)
{
    static void *libmpi;
    if (libmpi == NULL) {
        libmpi = dlopen("libmpi.so.40", RTLD_LAZY | RTLD_NOLOAD);
    }
    /* Another version has another name, and is what comes next in the global scope. */
    void *found = dlsym(libmpi == NULL ? RTLD_NEXT : libmpi, name);
    if (found == NULL) {
        abort();
    }
    return found;
}

/* Whether libmpi has the version that this file was written for. Others may have other
 * arguments and structures behind the same names. */
static bool
is_known(void)
{
    static int known = -1; /* each thread finds the same */
    if (known < 0) {
        char version[8192] = ""; /* above every MPI_MAX_LIBRARY_VERSION_STRING */
        int length = 0;
        ((Version *)open_mpi("MPI_Get_library_version"))(version, &length);
        known = strncmp(version, KNOWN, strlen(KNOWN)) == 0;
    }
    return known;
}

/* Number a new communicator. After this, others can see it. */
REPLACES int
ompi_comm_nextcid_nb(void *comm, void *parent, void *bridge, const void *first,
                     const void *second, bool send_first, int mode, void **request)
{
    NextCid *original = (NextCid *)open_mpi("ompi_comm_nextcid_nb");
    if (is_known()) {
        begin(comm);
    }
    return original(comm, parent, bridge, first, second, send_first, mode, request);
}

typedef struct { /* the beginning of Open MPI's objects, in builds without debugging */
    void *class;
    int32_t references;
} Object;

/* The caller releases the communicator. If it has become MPI_COMM_NULL, that is one
 * release too many. */
static void
keep_null(Object *comm)
{
    if ((void *)comm == open_mpi("ompi_mpi_comm_null") &&
        comm->class == open_mpi("ompi_communicator_t_class")) {
        __atomic_add_fetch(&comm->references, 1, __ATOMIC_RELAXED);
    }
}

/* Begin to complete a communicator that has its number. */
REPLACES int
ompi_comm_activate_nb(void **comm, void *parent, void *bridge, const void *first,
                      const void *second, bool send_first, int mode, void **request)
{
    Activate *original = (Activate *)open_mpi("ompi_comm_activate_nb");
    int result = original(comm, parent, bridge, first, second, send_first, mode, request);
    if (result != 0 && is_known()) {
        keep_null(*comm);
    }
    return result;
}

/* Give a communicator its collectives, which completes it. */
REPLACES int
mca_coll_base_comm_select(void *comm)
{
    Select *original = (Select *)open_mpi("mca_coll_base_comm_select");
    int result = original(comm);
    Revocation waiting = end(comm);
    if (waiting != NONE && result == 0) {
        ((Revoke *)open_mpi("ompi_comm_revoke_local"))(comm, waiting == COLLECTIVES);
    }
    return result;
}

/* Revoke a communicator, or only its collectives, in this process. Whether it was not
 * revoked before. */
REPLACES bool
ompi_comm_revoke_local(void *comm, bool only_collectives)
{
    Revoke *original = (Revoke *)open_mpi("ompi_comm_revoke_local");
    if (must_wait(comm, only_collectives ? COLLECTIVES : ALL)) {
        return true;
    }
    return original(comm, only_collectives);
}

/* -- the module ----------------------------------------------------------------------- */

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_late_revocation",
    .m_doc = "Import it into the global scope before libmpi.",
};

PyMODINIT_FUNC
PyInit__late_revocation(void)
{
    return PyModuleDef_Init(&module);
}
