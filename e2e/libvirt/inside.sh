#!/usr/bin/env bash
# A libvirtd of our own and guests that start from disks that `ringway serve` offers, attached by the
# XML that it prints. As root, in a mount namespace of its own (run.sh).
#
#   inside.sh RINGWAY VMLINUZ INITRD FOLDER
set -euo pipefail
here=$(realpath "$(dirname "$0")")
ringway=$1 kernel=$2 initrd=$3 folder=$4
cd "$folder"
export LIBVIRT_DEFAULT_URI=qemu:///system LC_ALL=C.UTF-8

step() { printf -- '-- %4d s  %s\n' $SECONDS "$*"; }
fail() {
    printf 'FAILED: %s\n' "$*"
    tail -n 20 serial-*.log libvirtd.log daemon*.log 2>/dev/null | tr -d '\r' || true
    tail -n 5 /var/log/libvirt/qemu/*.log 2>/dev/null || true
    exit 1
}
wait_for() { # wait_for SECONDS COMMAND…
    local left=$(($1 * 5))
    shift
    until "$@" >/dev/null 2>&1; do
        left=$((left - 1))
        [ $left -gt 0 ] || fail "it does not happen: $*"
        sleep 0.2
    done
}

# --- a disk that boots under SeaBIOS and OVMF ----------------------------------------------------------

disk() { # disk FILE WANTS
    local words="console=ttyS0 quiet panic=-1 no_timer_check ringway.scenario=libvirt ringway.timeout=500 ringway.wants=$2"
    "$here/../guest/boot-disk.sh" "$1" 160 "$kernel" "$initrd" "$words"
}

serve() { # serve NAME ARGS…: a daemon, ready
    local log=daemon-$1.log
    shift
    "$ringway" serve "$@" >>"$log" 2>&1 &
    daemon=$!
    wait_for 60 grep -q cloud-hypervisor "$log"
}

# What was printed for libvirt: its first line is for <domain>, the rest for <devices>.
xml() { sed -n '/^libvirt/,/^cloud-hypervisor/p' "$1" | sed '1d;$d'; }

domain() { # domain NAME MACHINE FIRMWARE DISKS MEMORY
    cat <<END
<domain type='qemu'>
  <name>$1</name><memory unit='MiB'>640</memory><vcpu>2</vcpu>
  $5
  <os><type arch='x86_64' machine='$2'>hvm</type>$3<boot dev='hd'/></os>
  <features><acpi/></features>
  <cpu mode='maximum'/>
  <on_reboot>destroy</on_reboot>
  <devices>
    <emulator>$(command -v qemu-system-x86_64)</emulator>
    $4
    <serial type='file'><source path='$folder/serial-$1.log'/></serial>
    <memballoon model='none'/>
  </devices>
</domain>
END
}

# calm NAME CONTROL: the few requests that a firmware has bounced or split are nothing to warn of.
calm() {
    local counts
    counts=$("$ringway" ctl --control "$2" stats --json | grep -oE '"(bounced|split|reads)": *[0-9]+' | tr -d '\n')
    echo "  after the firmware: $counts"
    ! grep -q 'bounced or split' "daemon-$1.log" || fail "a firmware earns a warning"
}
says() { tr -d '\r' <"serial-$1.log" | grep -q "RINGWAY $2"; }
rounds() { tr -d '\r' <"serial-$1.log" | grep -c 'RINGWAY INFO rounds' || true; }
more_rounds() { [ "$(rounds "$1")" -ge "$2" ]; }
is_over() { says "$1" DONE; }
judge() { # judge NAME: all its checks
    wait_for 240 is_over "$1"
    tr -d '\r' <"serial-$1.log" | grep -E 'RINGWAY (CHECK|INFO (kernel|uptime|sectors))' | sed 's/^.*RINGWAY/  /'
    ! says "$1" 'CHECK [a-z_0-9]* FAIL' || fail "the guest $1 is not content"
}

# --- libvirtd, without systemd, on folders of its own ------------------------------------------------

step "libvirtd"
cat >/etc/libvirt/qemu.conf <<END
user = "libvirt-qemu"
group = "kvm"
security_driver = "none"
cgroup_controllers = []
namespaces = []
stdio_handler = "file"
remember_owner = 0
END
printf 'auth_unix_rw = "none"\n' >/etc/libvirt/libvirtd.conf
libvirtd >libvirtd.log 2>&1 &
wait_for 120 virsh list
# They may be gone: that is no failure.
trap '{ virsh destroy bios; virsh destroy efi; jobs -p | xargs -r kill -KILL; } >/dev/null 2>&1 || true' EXIT

# --- the life of a guest ------------------------------------------------------------------------------

# life NAME MACHINE FIRMWARE: it starts from a disk, whose daemon is killed and which grows; it gets a
# second disk and gives it back.
life() {
    local name=$1 machine=$2 firmware=$3 control=$1-control.sock memory before
    disk "$name.img" kill,grow,hotplug
    truncate -s 64M "$name-data.img"
    cat >"$name.toml" <<END
control = "$control"
socket-group = "kvm"
[[disk]]
image = "$name.img"
socket = "$name.sock"
format = "raw"
queues = 2
[[disk]]
image = "$name-data.img"
socket = "$name-data.sock"
format = "raw"
END
    serve "$name-1" --config "$name.toml"
    xml "daemon-$name-1.log" >printed.xml
    memory=$(head -n 1 printed.xml)
    # Two disks were printed.
    awk -v RS='</disk>\n' -v ORS='</disk>\n' 'NR == 1' <(tail -n +2 printed.xml) >first.xml
    awk -v RS='</disk>\n' -v ORS='</disk>\n' 'NR == 2' <(tail -n +2 printed.xml) >second.xml
    domain "$name" "$machine" "$firmware" "$(cat first.xml)" "$memory" >"$name.xml"
    : >"serial-$name.log"
    chown libvirt-qemu "serial-$name.log"
    virsh create "$name.xml" || fail "it does not start"
    wait_for 240 says "$name" 'INFO ready_for kill'
    calm "$name-1" "$control"
    step "it works; the daemon is killed"
    kill -KILL $daemon
    wait $daemon 2>/dev/null || true
    before=$(rounds "$name")
    serve "$name-2" --config "$name.toml"
    wait_for 120 more_rounds "$name" $((before + 3))
    step "it goes on"
    wait_for 240 says "$name" 'INFO ready_for grow'
    "$ringway" ctl --control "$control" resize "$name.img" 320M
    wait_for 120 says "$name" 'INFO ready_for hotplug'
    step "it has seen the new size; a second disk"
    virsh attach-device "$name" second.xml --live || fail "it cannot be attached"
    wait_for 120 says "$name" 'INFO ready_for unplug'
    # The guest ends once its disk is gone, maybe before libvirt has heard of that; the guest is the judge.
    virsh detach-device "$name" second.xml --live || true
    judge "$name"
    says "$name" 'CHECK vdb_goes ok' || fail "it cannot be detached"
    says "$name" "INFO sectors_at_end $((320 * 2048))" || fail "the size at the end is wrong"
    wait_for 60 sh -c "! virsh domstate $name | grep -q running"
    kill -TERM $daemon
    wait $daemon || fail "the daemon ends with status $?"
}

step "a guest of SeaBIOS"
life bios pc ""

step "a guest of OVMF"
if [ -f /usr/share/OVMF/OVMF_CODE_4M.fd ]; then
    cp /usr/share/OVMF/OVMF_VARS_4M.fd vars.fd
    chown libvirt-qemu vars.fd
    life efi q35 "<loader readonly='yes' type='pflash'>/usr/share/OVMF/OVMF_CODE_4M.fd</loader><nvram>$folder/vars.fd</nvram>"
else
    echo "left out: there is no /usr/share/OVMF/OVMF_CODE_4M.fd (package ovmf)"
fi
step passed
