/* Makes a rank tell PMIx the user of MPI's launcher, who has another id on another host.
 *
 * When ranks join, the others publish where they are, and PRRTE shows what a process has
 * published only to processes that tell the same user's id (3.0: pmix_server_pub and
 * data_server). Each process tells its own id, which is `pmix_globals.uid`, and a user
 * seldom has one id on a laptop and on a server: the ranks would wait for one another for
 * ever. This is no protection that is lost, because nobody checks what a process tells.
 *
 * `PMIx_Init` below stands before PMIx's function of that name, as the functions in
 * `_late_revocation.c` do. If PMIx is of another version than 5.0, nothing changes.
 */
#define _GNU_SOURCE
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define REPLACES __attribute__((visibility("default")))
#define KNOWN "OpenPMIx 5.0."
#define VARIABLE "NBDIST_LAUNCHER_USER"

typedef int Init(void *, void *, size_t);
typedef const char *Version(void);

typedef struct { /* PMIx's value, of which the size matters */
    uint16_t type;
    struct {
        char *name, *text;
        char separator;
    } data;
} Value;

typedef struct { /* the beginning of pmix_globals_t of 5.0 */
    int initialized;
    struct {
        char nspace[256];
        uint32_t rank;
    } process;
    Value values[2];
    void *peer;
    uint32_t ids[4]; /* effective user and group; from 5.0.11 on, the real one before each */
} Globals;

/* Another structure has something else at these places, and is left as it is. */
static void
become(uint32_t *ids, uint32_t user)
{
    if (ids[0] == getuid() && ids[1] == geteuid() && ids[2] == getgid() &&
        ids[3] == getegid()) {
        ids[1] = user;
    } else if (ids[0] == geteuid() && ids[1] == getegid()) {
        ids[0] = user;
    }
}

REPLACES int
PMIx_Init(void *process, void *info, size_t count)
{
    /* Only Open MPI calls it, so libpmix is loaded. */
    void *libpmix = dlopen("libpmix.so.2", RTLD_LAZY | RTLD_NOLOAD);
    Init *original = libpmix == NULL ? NULL : (Init *)dlsym(libpmix, "PMIx_Init");
    if (original == NULL) {
        original = (Init *)dlsym(RTLD_NEXT, "PMIx_Init");
    }
    if (original == NULL) {
        abort();
    }
    int result = original(process, info, count);
    const char *wanted = getenv(VARIABLE);
    if (result != 0 || wanted == NULL || libpmix == NULL) {
        return result;
    }
    Version *version = (Version *)dlsym(libpmix, "PMIx_Get_version");
    Globals *globals = dlsym(libpmix, "pmix_globals");
    if (version != NULL && globals != NULL &&
        strncmp(version(), KNOWN, strlen(KNOWN)) == 0) {
        become(globals->ids, (uint32_t)strtoul(wanted, NULL, 10));
    }
    return result;
}

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_launchers_user",
    .m_doc = "Import it into the global scope before libmpi.",
};

PyMODINIT_FUNC
PyInit__launchers_user(void)
{
    return PyModuleDef_Init(&module);
}
