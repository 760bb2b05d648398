//! What every storage has to keep to.

use super::{
    Custom, Export, Flush, KeptBy, Local, NotAdopted, Parcel, Passthrough, Size, Storage, Unreal,
    take_over,
};
use crate::choices::{EngineKind, SimModel};
use ringway_aio::nvme::{Facts, Namespace};
use ringway_nbd_client::{Connected, Negotiated, Remote};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// A descriptor of the same file, as another process gets it.
fn sent(file: &Arc<File>) -> Arc<File> {
    Arc::new(file.try_clone().unwrap())
}

fn copy(parcel: &Parcel) -> Parcel {
    Parcel { files: parcel.files.iter().map(sent).collect(), ..parcel.clone() }
}

/// The contract.
fn keeps_to_it(storage: &dyn Storage, file: &Arc<File>) {
    let nature = storage.nature();
    assert!(nature.max_bytes >= 4096);
    assert_eq!(nature.kept_by == KeptBy::File, nature.flush == Flush::Host, "{storage:?}");
    assert!(!matches!(nature.size, Size::Fixed(_)) || !nature.has_length, "{storage:?}");
    if nature.size != Size::Asked {
        assert!(storage.bytes(file).is_err(), "{storage:?} says its size unasked");
    }
    let Ok(parcel) = storage.parcel() else { return };
    let (there, number) = (sent(file), parcel.files.len());
    let adopted = take_over(copy(&parcel), "disk", &there).unwrap();
    assert_eq!(adopted.nature(), nature);
    assert_eq!(adopted.beside().is_some(), storage.beside().is_some());
    assert_eq!(adopted.bytes(&there).ok(), storage.bytes(file).ok());
    // A successor of the successor has the same.
    let again = adopted.parcel().unwrap();
    let said = |of: &Parcel| (of.kind.clone(), of.numbers.clone(), of.words.clone());
    assert_eq!((said(&again), again.files.len()), (said(&parcel), number));

    let refused = |parcel: Parcel| take_over(parcel, "disk", &there).unwrap_err();
    for numbers in [0, parcel.numbers.len() - 1, parcel.numbers.len() + 1] {
        let mut damaged = copy(&parcel);
        damaged.numbers.resize(numbers, 0);
        assert!(matches!(refused(damaged), NotAdopted::Parcel(_)), "{storage:?}: {numbers}");
    }
    let mut damaged = copy(&parcel);
    damaged.words.push(None);
    assert!(matches!(refused(damaged), NotAdopted::Parcel(_)), "{storage:?}");
    let unknown = Parcel { kind: "tape".into(), ..parcel };
    let why = refused(unknown).to_string();
    assert!(why.contains("'tape'"), "{why}");
}

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
    keeps_to_it(&local, &file);
    keeps_to_it(&Local { is_device: true }, &file);

    let device = open("/dev/null");
    let block = File::open("/dev/zero").unwrap();
    keeps_to_it(&Passthrough(Arc::new(Namespace { facts: facts(), block })), &device);

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
    keeps_to_it(&export, &first);
}

#[test]
fn what_nobody_keeps_stays_with_its_process() {
    let file = open("/dev/null");
    let engines = [EngineKind::Null, EngineKind::NullAfter(1), EngineKind::Sim(SimModel::Ram)];
    for engine in engines {
        let unreal = Unreal { engine };
        keeps_to_it(&unreal, &file);
        assert!(unreal.parcel().is_err());
    }
    keeps_to_it(&Custom, &file);
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
