/* SPDX-License-Identifier: Apache-2.0
 *
 * A drive's queue in the kernel (Linux AIO), kept full by a thread that never waits for Python.
 *
 * A thread of Python has to have the interpreter's lock to go on, and gets it 5 ms late while
 * Python code runs elsewhere in the process: the drive would idle. This thread submits calls, takes
 * in their ends and continues those that stopped short. aio.py loads it through ctypes and says
 * what the functions mean. Linux AIO and not io_uring: the usual profile of containers allows it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/aio_abi.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define ALIGNMENT 4096
#define LAYOUT 2 /* of what Python passes and gets: aio.py has the same number */
#define MOST_EVENTS 512 /* that the kernel has at a time: fs.aio-max-nr counts them */
#define FULL_WAIT_US 1000

/* The kernel's calls, which tests replace. Each returns a result or -errno. */
static long checked(long result) { return result < 0 ? -errno : result; }
static long setup(unsigned most, aio_context_t *context) { return checked(syscall(SYS_io_setup, most, context)); }
static long submit(aio_context_t context, long count, struct iocb **calls) {
    return checked(syscall(SYS_io_submit, context, count, calls));
}
static long getevents(aio_context_t context, long most, struct io_event *events) {
    struct timespec now = {0, 0};
    return checked(syscall(SYS_io_getevents, context, 0L, most, events, &now));
}
long (*kernel_setup)(unsigned, aio_context_t *) = setup;
long (*kernel_submit)(aio_context_t, long, struct iocb **) = submit;
long (*kernel_getevents)(aio_context_t, long, struct io_event *) = getevents;

typedef struct {
    int64_t ticket, left; /* calls that have not ended */
} Batch;

typedef struct Call {
    struct Call *next;
    Batch *batch;
    int64_t position;      /* of its transfer in the batch */
    size_t bytes;          /* that are still to move */
    struct iovec *vectors; /* those of them, a part of `all` */
    struct iocb iocb;
    struct iovec all[];
} Call;

/* What `queue_put` is given for each call. */
typedef struct {
    int64_t fd, offset, position, vectors;
} CallHead;

/* `position` < 0: the batch has ended; else a call of that transfer failed with `error`. */
typedef struct {
    int64_t ticket, position, error;
} Report;

_Static_assert(sizeof(struct iovec) == 16 && sizeof(long) == 8, "aio.py packs these for 64 bits");

typedef struct Queue {
    aio_context_t context;
    int wake; /* an eventfd: the kernel counts ends there, and `queue_put` what comes */
    size_t ahead_bytes, beside_reads_bytes;
    struct Queue *reads; /* that this queue of writes makes way for */
    pthread_t thread;
    atomic_long batches; /* that have not ended */
    pthread_mutex_t lock; /* nobody waits for a drive while holding it */
    pthread_cond_t reported;
    Call *first, **last;    /* that the kernel has not been given */
    size_t given_bytes;     /* that it has, and may still touch */
    long given;
    Report *reports;
    long report_count, report_room, due; /* due: reports that are to come, for which there is room */
    int closed;
} Queue;

static void report(Queue *queue, int64_t ticket, int64_t position, int64_t error) {
    queue->reports[queue->report_count++] = (Report){ticket, position, error};
    queue->due--;
    pthread_cond_signal(&queue->reported);
}

/* Take in a call's result, under the lock: bytes or -errno. */
static void settle(Queue *queue, Call *call, long result) {
    queue->given--;
    queue->given_bytes -= call->bytes;
    if (result > 0 && (size_t)result < call->bytes && result % ALIGNMENT == 0) { /* it stopped short */
        call->bytes -= result;
        call->iocb.aio_offset += result;
        while ((size_t)result >= call->vectors->iov_len) {
            result -= call->vectors->iov_len;
            call->vectors++;
            call->iocb.aio_nbytes--;
        }
        call->vectors->iov_base = (char *)call->vectors->iov_base + result;
        call->vectors->iov_len -= result;
        call->iocb.aio_buf = (uintptr_t)call->vectors;
        call->next = queue->first;
        queue->first = call;
        if (!call->next)
            queue->last = &call->next;
        return;
    }
    if (result != (long)call->bytes) /* or the end of the file, or a rest that O_DIRECT cannot go on from */
        report(queue, call->batch->ticket, call->position, result < 0 ? -result : EIO);
    else
        queue->due--;
    if (--call->batch->left == 0) {
        report(queue, call->batch->ticket, -1, 0);
        atomic_fetch_sub(&queue->batches, 1);
        free(call->batch);
    }
    free(call);
}

/* Take what the kernel may be given, under the lock. There is always room for one call, after whose
 * end this is asked again. */
static long take(Queue *queue, Call **taken) {
    int making_way = queue->reads && atomic_load(&queue->reads->batches);
    size_t most_bytes = making_way ? queue->beside_reads_bytes : queue->ahead_bytes;
    long count = 0;
    while (queue->first && queue->given_bytes < most_bytes && queue->given < MOST_EVENTS) {
        Call *call = taken[count++] = queue->first;
        queue->first = call->next;
        if (!queue->first)
            queue->last = &queue->first;
        queue->given_bytes += call->bytes;
        queue->given++;
    }
    return count;
}

static void wake(Queue *queue) {
    uint64_t one = 1;
    while (write(queue->wake, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

/* Take in the calls that have ended, without waiting for any. */
static void reap(Queue *queue) {
    struct io_event events[MOST_EVENTS];
    long ended = kernel_getevents(queue->context, MOST_EVENTS, events);
    pthread_mutex_lock(&queue->lock);
    for (long at = 0; at < ended; at++)
        settle(queue, (Call *)(uintptr_t)events[at].data, events[at].res);
    pthread_mutex_unlock(&queue->lock);
}

static void give(Queue *queue, Call **taken, long count) {
    struct iocb *calls[MOST_EVENTS];
    for (long at = 0; at < count; at++)
        calls[at] = &taken[at]->iocb;
    for (long done = 0; done < count;) {
        long result = kernel_submit(queue->context, count - done, calls + done);
        if (result > 0)
            done += result;
        else if (result == -EAGAIN) { /* the kernel is short of something */
            reap(queue);
            usleep(FULL_WAIT_US);
        } else if (result != -EINTR) {
            pthread_mutex_lock(&queue->lock);
            settle(queue, taken[done++], result ? result : -EIO);
            pthread_mutex_unlock(&queue->lock);
            wake(queue); /* there is room, and maybe no end to come */
        }
    }
}

static void *run(void *argument) {
    Queue *queue = argument;
    Call *taken[MOST_EVENTS];
    for (;;) {
        pthread_mutex_lock(&queue->lock);
        long count = take(queue, taken);
        int over = queue->closed && !queue->given;
        pthread_mutex_unlock(&queue->lock);
        if (over)
            return NULL;
        give(queue, taken, count);
        uint64_t woken;
        if (read(queue->wake, &woken, sizeof woken) < 0) {
            usleep(errno == EINTR ? 0 : FULL_WAIT_US);
            continue;
        }
        reap(queue);
    }
}

int64_t queue_layout(void) { return LAYOUT; }

/* Make what the kernel has of a queue, and try each call: a sandbox may let through some of them
 * alone, and then nothing would ever end. Return -errno and the call that is refused, or 0. */
static long begin(Queue *queue, const char **call) {
    struct io_event event;
    *call = "eventfd";
    queue->wake = eventfd(0, EFD_CLOEXEC);
    if (queue->wake < 0)
        return -errno;
    *call = "io_setup";
    long result = kernel_setup(MOST_EVENTS, &queue->context);
    if (result < 0)
        return result;
    *call = "io_submit";
    result = kernel_submit(queue->context, 0, NULL);
    if (result < 0)
        return result;
    *call = "io_getevents";
    return kernel_getevents(queue->context, 1, &event);
}

Queue *queue_open(size_t ahead_bytes, size_t beside_reads_bytes, Queue *reads, int64_t *error, const char **call) {
    Queue *queue = calloc(1, sizeof *queue);
    *call = "calloc";
    if (!queue) {
        *error = ENOMEM;
        return NULL;
    }
    long result = begin(queue, call);
    queue->ahead_bytes = ahead_bytes;
    queue->beside_reads_bytes = beside_reads_bytes;
    queue->reads = reads;
    queue->last = &queue->first;
    pthread_mutex_init(&queue->lock, NULL);
    pthread_cond_init(&queue->reported, NULL);
    if (result >= 0) {
        sigset_t all, before; /* signals are for the process's own threads */
        *call = "pthread_create";
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        result = -pthread_create(&queue->thread, NULL, run, queue);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    if (result >= 0)
        return queue;
    *error = -result;
    if (queue->context)
        syscall(SYS_io_destroy, queue->context);
    if (queue->wake >= 0)
        close(queue->wake);
    free(queue);
    return NULL;
}

int64_t queue_put(Queue *queue, int64_t ticket, int64_t opcode, int64_t count, const CallHead *heads,
                  const struct iovec *vectors) {
    Batch *batch = malloc(sizeof *batch);
    Call *first = NULL, **last = &first;
    int short_of_memory = !batch;
    for (int64_t at = 0; at < count && !short_of_memory; at++) {
        size_t size = heads[at].vectors * sizeof *vectors;
        Call *call = calloc(1, sizeof *call + size);
        if (!call) {
            short_of_memory = 1;
            break;
        }
        memcpy(call->all, vectors, size);
        for (int64_t each = 0; each < heads[at].vectors; each++)
            call->bytes += vectors[each].iov_len;
        vectors += heads[at].vectors;
        call->vectors = call->all;
        call->batch = batch;
        call->position = heads[at].position;
        call->iocb.aio_data = (uintptr_t)call;
        call->iocb.aio_lio_opcode = opcode;
        call->iocb.aio_fildes = heads[at].fd;
        call->iocb.aio_buf = (uintptr_t)call->all;
        call->iocb.aio_nbytes = heads[at].vectors;
        call->iocb.aio_offset = heads[at].offset;
        call->iocb.aio_flags = IOCB_FLAG_RESFD;
        call->iocb.aio_resfd = queue->wake;
        *last = call;
        last = &call->next;
    }
    pthread_mutex_lock(&queue->lock);
    long wanted = queue->report_count + queue->due + count + 1;
    if (!short_of_memory && wanted > queue->report_room) {
        Report *grown = realloc(queue->reports, 2 * wanted * sizeof *grown);
        short_of_memory = !grown;
        if (grown) {
            queue->reports = grown;
            queue->report_room = 2 * wanted;
        }
    }
    if (!short_of_memory) {
        *batch = (Batch){ticket, count};
        queue->due += count + 1;
        *queue->last = first;
        queue->last = last;
        atomic_fetch_add(&queue->batches, 1);
    }
    pthread_mutex_unlock(&queue->lock);
    if (!short_of_memory) {
        wake(queue);
        return 0;
    }
    while (first) {
        Call *next = first->next;
        free(first);
        first = next;
    }
    free(batch);
    return -ENOMEM;
}

int64_t queue_wait(Queue *queue, Report *reports, int64_t most) {
    pthread_mutex_lock(&queue->lock);
    while (!queue->report_count && !queue->closed)
        pthread_cond_wait(&queue->reported, &queue->lock);
    int64_t count = queue->report_count < most ? queue->report_count : most;
    memcpy(reports, queue->reports, count * sizeof *reports);
    queue->report_count -= count;
    memmove(queue->reports, queue->reports + count, queue->report_count * sizeof *reports);
    pthread_mutex_unlock(&queue->lock);
    return count;
}

void queue_close(Queue *queue) {
    pthread_mutex_lock(&queue->lock);
    queue->closed = 1;
    pthread_cond_broadcast(&queue->reported);
    pthread_mutex_unlock(&queue->lock);
    wake(queue);
    pthread_join(queue->thread, NULL);
}

void queue_free(Queue *queue) {
    syscall(SYS_io_destroy, queue->context);
    close(queue->wake);
    pthread_cond_destroy(&queue->reported);
    pthread_mutex_destroy(&queue->lock);
    free(queue->reports);
    free(queue);
}
