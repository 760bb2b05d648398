//! What storages of this crate say of themselves; what is read and written is in `disk/tests/`.

use super::contract::is_sound;
use super::{Custom, Export, Local, Passthrough, Storage, Unreal, take_over};
use crate::choices::{EngineKind, SimModel};
use ringway_aio::nvme::{Facts, Namespace};
use ringway_nbd_client::{Connected, Negotiated, Remote};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

fn facts() -> Facts {
    Facts {
        id: 7,
        block_shift: 12,
        max_bytes: 128 << 10,
        discard_blocks: 3,
        zero_blocks: 65536,
        deallocates_zeroed: true,
    }
}

fn open(path: &str) -> Arc<File> {
    Arc::new(File::open(path).unwrap())
}

#[test]
fn c95_what_one_process_opens_another_one_serves() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(12288).unwrap();
    let file = Arc::new(file);
    let local = Local { is_device: false };
    assert_eq!(local.bytes(&file).unwrap(), 12288);
    is_sound(&local, &file);
    is_sound(&Local { is_device: true }, &file);

    let device = open("/dev/null");
    let block = File::open("/dev/zero").unwrap();
    is_sound(&Passthrough(Arc::new(Namespace { facts: facts(), block })), &device);

    let socket = || {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        (Arc::new(File::from(OwnedFd::from(ours))), theirs)
    };
    let ((first, _one), (second, _other)) = (socket(), socket());
    let negotiated = Negotiated {
        bytes: 1 << 40,
        flags: 0x4a5,
        min_block: 1,
        preferred_block: 4096,
        max_block: 1 << 25,
        structured: true,
        block_status: None,
    };
    let (export, away) = (Some("an export".to_owned()), None);
    let connected =
        Connected { socket: Arc::clone(&first), others: vec![second], negotiated, export, away };
    let export = Export(Arc::new(Remote::new("disk", &connected)));
    assert_eq!(export.parcel().unwrap().files.len(), 1);
    is_sound(&export, &first);
}

#[test]
fn what_nobody_keeps_stays_with_its_process() {
    let file = open("/dev/null");
    let engines = [EngineKind::Null, EngineKind::NullAfter(1), EngineKind::Sim(SimModel::Ram)];
    for engine in engines {
        let unreal = Unreal { engine };
        is_sound(&unreal, &file);
        assert!(unreal.parcel().is_err());
    }
    is_sound(&Custom, &file);
    assert!(Custom.parcel().is_err());
}

#[test]
fn c95_a_namespace_with_odd_blocks_is_not_served() {
    let device = open("/dev/null");
    let parcel = || {
        let block = File::open("/dev/zero").unwrap();
        Passthrough(Arc::new(Namespace { facts: facts(), block })).parcel().unwrap()
    };
    assert!(take_over(parcel(), "disk", &device).is_ok());
    for shift in [0, 8, 17, 1 << 40] {
        let mut odd = parcel();
        odd.numbers[1] = shift;
        assert!(take_over(odd, "disk", &device).is_err(), "{shift}");
    }
    let mut lone = parcel();
    lone.files.clear();
    assert!(take_over(lone, "disk", &device).is_err());
}
