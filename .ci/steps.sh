# Steps of a run, and the summary that closes its output. Sourced by .ci/run.
#
#   step NAME SECONDS COMMAND...     run it for at most so long, and show its output as it comes
#   begin NAME SECONDS COMMAND...    begin it, beside what follows
#   end NAME...                      wait for what was begun, and show its output
#   alone NAME SECONDS COMMAND...    where NAME has failed: once more, when nothing runs beside it. What passes then has passed, and is named
#   commits                          the commit's number, which says what has its turn; nothing where that cannot be known
#   is_due TURN PATH...              does an extra run with this commit? In its turn, and if the commit touches a path
#   pass_over NAME                   it does not
#   passed NAME...                   did all of them, or were passed over?
#
# A step that fails keeps no other from running. When the script ends, for whatever reason, `summary` says what came of each, and sets the code.
# COMMAND is a program, not a function, so that what ends the script can end it, too. No step lasts beyond `whole_s` of the script's seconds.

declare -A running began_s lasted_s outcome
names=()
logs=$(mktemp -d)
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

step() {
    title "$1"
    begin "$@"
    tail -n +1 --pid="${running[$1]}" --sleep-interval=0.5 -f "$logs/$1"
    ended "$1"
}

begin() {
    names+=("$1")
    outcome[$1]='did not come to its end'
    began_s[$1]=$(date +%s)
    : >"$logs/$1"
    timeout --kill-after=30 "$(within "$2")" "${@:3}" >"$logs/$1" 2>&1 &
    running[$1]=$!
}

within() { # seconds: so many, or as many as the whole run has left
    local left=$((${whole_s:-86400} - SECONDS))
    printf '%s' "$(($1 < left ? $1 : left > 1 ? left : 1))"
}

commits() {
    [ "$(git rev-parse --is-shallow-repository 2>/dev/null)" = false ] && git rev-parse -q --verify HEAD~1 >/dev/null || return 0
    git rev-list --count --first-parent HEAD
}

is_due() {
    local now
    now=$(commits)
    [ $((${now:-$1} % 3)) = "$1" ] || ! git diff --quiet HEAD~1 HEAD -- .ci "${@:2}"
}

pass_over() {
    names+=("$1")
    lasted_s[$1]=0
    outcome[$1]='passed over: it has its turn with every third commit'
}

end() {
    local name
    for name; do
        [ -n "${running[$name]:-}" ] || continue
        ended "$name"
        title "$name"
        cat "$logs/$name"
    done
}

# A run that was stopped because it took too long has hung; that is not tried again.
alone() {
    local name=$1
    case ${outcome[$name]} in passed* | 'did not'* | *'code 124' | *'code 137') return ;; esac
    step "$name, alone" "${@:2}"
    unset 'names[-1]'
    if [ "${outcome["$name, alone"]}" = passed ]; then
        outcome[$name]='passed alone, failed beside others'
    else
        mv "$logs/$name, alone" "$logs/$name"
    fi
}

passed() {
    local name
    for name; do
        case ${outcome[$name]} in passed*) ;; *) return 1 ;; esac
    done
}

title() { printf '\n== %s  [%d s]\n' "$1" "$SECONDS"; }

ended() {
    local code=0
    wait "${running[$1]}" || code=$?
    unset "running[$1]"
    # Of what ran beside others: until its last word.
    lasted_s[$1]=$(($(date -r "$logs/$1" +%s) - began_s[$1]))
    outcome[$1]=passed
    [ "$code" = 0 ] || outcome[$1]="FAILED with code $code"
}

# What is written here is short, because it is all that some readers see.
summary() {
    local name code=0
    title summary
    for name in "${names[@]}"; do
        printf '%6s s  %s: %s\n' "${lasted_s[$name]:-?}" "$name" "${outcome[$name]}"
        passed "$name" || code=1
        case ${outcome[$name]} in
        passed | 'passed over'*) ;;
        passed*) what_failed "$logs/$name" | sed 's/FAILED //' ;;
        *) what_failed "$logs/$name" ;;
        esac
    done
    return $code
}

what_failed() { # log: the tests that failed; its last words where it names none
    local tests
    tests=$(grep -aE '^(FAILED|ERROR) [^ ]+\.(py|md)' "$1" | sort -u | cut -c 1-200)
    [ -n "$tests" ] || tests=$(grep -av '^ *$' "$1" | tail -n 3 | cut -c 1-200)
    printf '%s\n' "$tests" | head -n 25 | sed 's/^./            &/'
}

finish() {
    local code=$?
    # shellcheck disable=SC2046  # a list of numbers
    kill $(jobs -p) 2>/dev/null
    summary || code=$((code > 1 ? code : 1))
    rm -rf "$logs"
    exit "$code"
}
