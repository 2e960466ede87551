# Sourced by the job scripts: plans a run, runs what may be pre-empted, and queues the job again.
# shellcheck shell=bash

# dustmap ends with this code when SIGTERM has made it keep its state: `run --resume` goes on.
readonly PREEMPTED=75
# With this one a run is good for a map whose checks fail.
readonly CHECKS_FAILED=3

# plan COMMAND...
#
# Prints what a run would do; ends the job where it cannot, but not where a check of its catalog
# fails, for the map is made all the same.
plan() {
    local code=0
    "$@" || code=$?
    if ((code != 0 && code != CHECKS_FAILED)); then exit "$code"; fi
}

# run_or_requeue COMMAND...
#
# Slurm sends SIGUSR1 to this shell alone (#SBATCH --signal=B:USR1@120), two minutes before the
# time limit or the pre-emption; some sites send SIGTERM. Either goes on to the command as SIGUSR1,
# which ends dustmap as SIGTERM does: srun hands it to the tasks, and kills them at a SIGTERM.
# A shell that waits for a program in the foreground would hear of a signal only when it is over,
# so the program is in the background and `wait` is what the signal interrupts.
run_or_requeue() {
    local child="" told=0 code=0
    # Once is enough: what follows cannot be interrupted again.
    trap 'trap "" USR1 TERM; told=1; [[ -z $child ]] || kill -USR1 "$child" 2>/dev/null || true' USR1 TERM
    "$@" &
    child=$!
    if ((told)); then kill -USR1 "$child" 2>/dev/null || true; fi
    wait "$child" || code=$?
    # The signal ended `wait`, or came when it was over: the shell still knows the command's code.
    if ((told)); then
        code=0
        wait "$child" || code=$?
    fi
    trap - USR1 TERM
    # SIGUSR1 or SIGTERM came before the program had begun to listen.
    if ((code == PREEMPTED || (told && (code == 138 || code == 143)))); then
        echo "pre-empted: job ${SLURM_JOB_ID} goes back to the queue" >&2
        scontrol requeue "${SLURM_JOB_ID}"
        exit "$PREEMPTED"
    fi
    return "$code"
}
