//! The keys of a disk in xenstore: what this side says, what the other side has said.
//!
//! Source: `xen/include/public/io/blkif.h` (MIT), "Feature and Parameter Negotiation".

use super::limits::{GuestLimits, INDIRECT_SEGMENTS};
use super::xenbus::{Seen, State};
use super::xenstore::{StoreError, Tx, Xenstore};
use ringway_core::Geometry;
use ringway_ring::blkif::{Abi, Offered, RING_ORDER_MAX};

/// `VDISK_READONLY` of the key `info`.
const READ_ONLY: &str = "4";

/// Where a disk is in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// The back-end's folder: `backend/NAME/DOMAIN/DEVICE`.
    pub back: String,
    /// The front-end's folder.
    pub front: String,
    /// The front-end's domain.
    pub domid: u16,
    /// The virtual device.
    pub devid: u32,
    /// What the toolstack says is to be served: the key `params`.
    pub params: String,
    /// The key `mode`: the guest may not write.
    pub read_only: bool,
}

impl Address {
    /// Reads where the front-end of `back` is; `None` if the folder is not whole.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn read(store: &mut Xenstore, back: &str) -> Result<Option<Self>, StoreError> {
        let mut parts = back.rsplit('/');
        let (devid, domid) = (parts.next(), parts.next());
        let (Some(Ok(devid)), Some(Ok(domid))) =
            (devid.map(str::parse), domid.map(str::parse::<u16>))
        else {
            return Ok(None);
        };
        let mut read = |key: &str| store.read(Tx::NONE, &format!("{back}/{key}"));
        let (Some(front), Some(params), Some(mode)) =
            (read("frontend")?, read("params")?, read("mode")?)
        else {
            return Ok(None);
        };
        let (back, read_only) = (back.to_owned(), !mode.starts_with('w'));
        Ok(Some(Self { back, front, domid, devid, params, read_only }))
    }
}

/// What is said about a disk.
#[derive(Clone, Debug)]
pub(super) struct Saying {
    pub(super) queues: u16,
    pub(super) geometry: Geometry,
    /// The guest may rely on a write cache and its flushes.
    pub(super) write_cache: bool,
    pub(super) persistent: bool,
    /// What its front-end is told of what costs it memory. It may ask for as much as there is all the
    /// same: a predecessor may have told it something else, and it harms nobody but its own guest.
    pub(super) limits: GuestLimits,
}

impl Saying {
    /// The same for the ring, which refuses what was not offered.
    pub(super) fn offered(&self) -> Offered {
        Offered {
            flush: self.write_cache,
            barrier: self.write_cache,
            discard: self.discards(),
            indirect_segments: INDIRECT_SEGMENTS,
        }
    }

    fn discards(&self) -> bool {
        self.geometry.discard && !self.geometry.read_only
    }

    /// Keys and values. `sectors` counts 512 bytes each, whatever `sector-size` says: this is what
    /// all front-ends take it for.
    pub(super) fn keys(&self) -> Vec<(&'static str, String)> {
        let geometry = &self.geometry;
        let flag = |on: bool| u8::from(on).to_string();
        let info = if geometry.read_only { READ_ONLY } else { "0" };
        let mut keys = vec![
            ("multi-queue-max-queues", self.queues.to_string()),
            ("max-ring-page-order", self.limits.ring_order.to_string()),
            ("feature-persistent", flag(self.limits.persistent)),
            ("feature-max-indirect-segments", self.limits.indirect_segments.to_string()),
            ("feature-flush-cache", flag(self.write_cache)),
            ("feature-barrier", flag(self.write_cache)),
            ("feature-discard", flag(self.discards())),
            ("sectors", geometry.sectors().to_string()),
            ("sector-size", geometry.logical_block.to_string()),
            ("physical-sector-size", geometry.physical_block.to_string()),
            ("info", info.to_owned()),
        ];
        if self.discards() {
            let granularity = geometry.discard_granularity.max(geometry.logical_block);
            keys.push(("discard-granularity", granularity.to_string()));
            keys.push(("discard-alignment", "0".to_owned()));
            keys.push(("discard-secure", "0".to_owned()));
        }
        keys
    }
}

/// Where one ring is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RingKeys {
    pub(super) pages: Vec<u32>,
    pub(super) port: u32,
}

/// What a front-end has said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FrontKeys {
    pub(super) abi: Abi,
    pub(super) order: u32,
    pub(super) persistent: bool,
    pub(super) rings: Vec<RingKeys>,
}

/// Why a front-end cannot be served.
#[derive(Debug, thiserror::Error)]
pub(super) enum KeyError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the front-end has not written {0}")]
    Missing(String),
    #[error("the front-end has written {value:?} to {key}, which {why}")]
    Wrong { key: String, value: String, why: String },
}

fn wrong(key: &str, value: &str, why: impl Into<String>) -> KeyError {
    KeyError::Wrong { key: key.to_owned(), value: value.to_owned(), why: why.into() }
}

/// A number from the store; `None` if the key is not there.
fn number(store: &mut Xenstore, key: &str) -> Result<Option<u32>, KeyError> {
    let Some(text) = store.read(Tx::NONE, key)? else { return Ok(None) };
    match text.trim().parse() {
        Ok(number) => Ok(Some(number)),
        Err(_) => Err(wrong(key, &text, "is no number")),
    }
}

impl FrontKeys {
    /// Reads and judges what is said in the folder `front`, after `saying` was said in `back`.
    pub(super) fn read(
        store: &mut Xenstore,
        front: &str,
        back: &str,
        saying: &Saying,
    ) -> Result<Self, KeyError> {
        let key = format!("{front}/multi-queue-num-queues");
        let queues = number(store, &key)?.unwrap_or(1);
        if queues == 0 || queues > saying.queues.into() {
            let why = format!("is not 1 to {}, the most that was offered", saying.queues);
            return Err(wrong(&key, &queues.to_string(), why));
        }
        let order = Self::order(store, front)?;
        let key = format!("{front}/protocol");
        let abi = match store.read(Tx::NONE, &key)? {
            // Not said: the ABI of this host.
            None => Abi::X86_64,
            Some(name) => Abi::from_name(name.trim()).ok_or_else(|| {
                wrong(
                    &key,
                    &name,
                    format!("is not {} or {}", Abi::X86_64.name(), Abi::X86_32.name()),
                )
            })?,
        };
        let persistent = number(store, &format!("{front}/feature-persistent"))?.unwrap_or(0) != 0;
        let mut rings = Vec::new();
        for queue in 0..queues {
            // With one queue the old, flat layout.
            let folder = if queues == 1 { front.into() } else { format!("{front}/queue-{queue}") };
            rings.push(RingKeys::read(store, &folder, order)?);
        }
        // Linux says that it would use the same pages again even to a back-end that does not, and then
        // takes a page that is still mapped at the end of a request for a fault of its device. What
        // counts is what was offered, by a predecessor perhaps; no answer says no.
        let offered = number(store, &format!("{back}/feature-persistent"))?.unwrap_or(0) != 0;
        let persistent = persistent && offered && saying.persistent;
        Ok(Self { abi, order: order.unwrap_or(0), persistent, rings })
    }

    /// `None`: the front-end does not know of it, and names its only page in another way.
    fn order(store: &mut Xenstore, front: &str) -> Result<Option<u32>, KeyError> {
        let key = format!("{front}/ring-page-order");
        let order = number(store, &key)?;
        match order {
            Some(order) if order > RING_ORDER_MAX => {
                let why = format!("is above {RING_ORDER_MAX}, the most that was offered");
                Err(wrong(&key, &order.to_string(), why))
            }
            order => Ok(order),
        }
    }
}

impl RingKeys {
    fn read(store: &mut Xenstore, folder: &str, order: Option<u32>) -> Result<Self, KeyError> {
        let mut need = |key: String| number(store, &key)?.ok_or(KeyError::Missing(key));
        let port = need(format!("{folder}/event-channel"))?;
        let pages = match order {
            None => vec![need(format!("{folder}/ring-ref"))?],
            Some(order) => {
                let pages = (0..1u32 << order).map(|at| need(format!("{folder}/ring-ref{at}")));
                pages.collect::<Result<_, _>>()?
            }
        };
        Ok(Self { pages, port })
    }
}

/// How much memory a guest has, in bytes, as its toolstack says: what it is to have now, or else the
/// most that it can have. `None` if that is not said.
pub(super) fn guest_memory(store: &mut Xenstore, domid: u16) -> Result<Option<u64>, StoreError> {
    for key in ["target", "static-max"] {
        let said = store.read(Tx::NONE, &format!("/local/domain/{domid}/memory/{key}"));
        let kib = match said {
            // No text, or a key that we may not read, says nothing.
            Err(error) if !error.is_final() => continue,
            said => said?.and_then(|text| text.trim().parse::<u64>().ok()),
        };
        if let Some(kib) = kib.filter(|&kib| kib > 0) {
            return Ok(Some(kib.saturating_mul(1024)));
        }
    }
    Ok(None)
}

/// What the store says of a device now. A store that cannot tell has not said that anything is gone.
///
/// # Errors
/// [`StoreError`].
pub(super) fn read(store: &mut Xenstore, at: &Address) -> Result<Seen, StoreError> {
    // What is no text says nothing; what a guest has written may be anything, and it may keep it to itself.
    let front = format!("{}/state", at.front);
    let mut read = |key: String| match store.read(Tx::NONE, &key) {
        Err(StoreError::NotText(_)) => Ok(None),
        Err(error) if key == front && error.is("EACCES") => Ok(None),
        said => said,
    };
    let state = |text: Option<String>| text.map_or(State::Unknown, |text| State::parse(&text));
    let back = &at.back;
    // The toolstack makes and removes a folder at once; this key is in it from the first moment. If
    // it says something else now, the device is another one.
    let present = read(format!("{back}/params"))?.is_some_and(|params| params == at.params);
    let online = read(format!("{back}/online"))?.is_some_and(|word| word.trim() != "0");
    let own = state(read(format!("{back}/state"))?);
    let front = state(read(front.clone())?);
    Ok(Seen { present, online, back: own, front })
}

#[cfg(test)]
mod tests;
