#!/usr/bin/env bash
# Two hosts on one machine: two network namespaces with a cable (veth) between them, a Ray node in each.
# Runs a command on the first and ends both; needs root (or CAP_NET_ADMIN and CAP_SYS_ADMIN) and iproute2.
#
#   scripts/two_nodes_here.sh async-rl train configs/quickstart.yaml placement.rollout.nodes=1
#
# The first host offers the Ray resource `learner`, the second `rollout` (placement.learner.resource, ...).
# ASYNC_RL_NOT_SHARED=DIR: the second host has an empty folder of its own in place of DIR, as without a shared disk.
# ASYNC_RL_FIRST_RESOURCES=JSON: what the first host offers instead, such as {"learner": 1, "rollout": 1}.
# ASYNC_RL_SECOND_WHILE=FILE: the second host is there while FILE exists; then its Ray node gets SIGTERM, and drains.
# The hosts are the network namespaces arlPIDa and arlPIDb; PID is that of this script.
# What `ray start` starts has ASYNC_RL_HOST, the address of its host; the command has it not.
# ASYNC_RL_LINK_STATS=FILE: writes the bytes that crossed the cable, in either direction, to FILE.
set -euo pipefail

id=$$
here=arl${id}a there=arl${id}b
here_ip=10.77.0.1 there_ip=10.77.0.2
ray=$(mktemp -d /tmp/arl-XXXXXX)

cleanup() {
    status=$?
    trap - EXIT
    if [ -n "${ASYNC_RL_LINK_STATS:-}" ]; then
        ip netns exec "$here" cat /proc/net/dev > "$ASYNC_RL_LINK_STATS" || true
    fi
    [ -z "${second:-}" ] || kill -KILL "$second" 2> /dev/null || true  # else it waits for the second host's return
    for host in "$here" "$there"; do  # what runs there is all ours; Ray would take its time
        for pid in $(ip netns pids "$host" 2> /dev/null); do kill -KILL "$pid" 2> /dev/null || true; done
    done
    wait 2> /dev/null || true
    ip netns del "$here" || true
    ip netns del "$there" || true
    rm -rf "$ray"
    exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

ip netns add "$here"
ip netns add "$there"
ip link add "v$id"a netns "$here" type veth peer name "v$id"b netns "$there"
ip -n "$here" addr add "$here_ip/24" dev "v$id"a
ip -n "$there" addr add "$there_ip/24" dev "v$id"b
for host in "$here" "$there"; do
    ip -n "$host" link set lo up
    for device in $(ip -n "$host" -o link | grep -o "v$id[ab]" | sort -u); do ip -n "$host" link set "$device" up; done
done

export RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n')
export RAY_AUTH_TOKEN
export RAY_worker_niceness=0
own_disk=()
cpus=${ASYNC_RL_CPUS:-8}
start_ray() { # host, address of it, Ray's own arguments...
    local host=$1 address=$2
    shift 2
    setsid ip netns exec "$host" env ASYNC_RL_HOST="$address" "${own_disk[@]}" ray start --block --node-ip-address="$address" --num-cpus="$cpus" \
        --object-store-memory=134217728 --disable-usage-stats "$@" > "$ray/$address.log" 2>&1 &
}
started() { # address of a host
    for _ in $(seq 300); do
        grep -q "Ray runtime started" "$ray/$1.log" && return
        sleep 0.2
    done
    tail -n 20 "$ray/$1.log" >&2
    exit 1
}
first='{"learner": 1}'
start_ray "$here" "$here_ip" --head --port=6379 --temp-dir="$ray" --include-dashboard=false \
    --resources="${ASYNC_RL_FIRST_RESOURCES:-$first}"
started "$here_ip"
if [ -n "${ASYNC_RL_NOT_SHARED:-}" ]; then  # each host has mounts of its own too
    own_disk=(bash -c 'mount -t tmpfs none "$0" && exec "$@"' "$ASYNC_RL_NOT_SHARED")
fi
start_second() { start_ray "$there" "$there_ip" --address="$here_ip:6379" --resources='{"rollout": 1}'; }
if [ -n "${ASYNC_RL_SECOND_WHILE:-}" ]; then
    while true; do
        until [ -e "$ASYNC_RL_SECOND_WHILE" ]; do sleep 0.5; done
        start_second
        node=$!
        while [ -e "$ASYNC_RL_SECOND_WHILE" ]; do sleep 0.5; done
        kill -TERM "$node" 2> /dev/null || true  # it may be dead
        wait "$node" || true
        # what a host that is switched off no longer has
        for pid in $(ip netns pids "$there" 2> /dev/null); do kill -KILL "$pid" 2> /dev/null || true; done
    done &
    second=$!
else
    start_second
    started "$there_ip"
fi

RAY_ADDRESS=$here_ip:6379 ip netns exec "$here" "$@"
