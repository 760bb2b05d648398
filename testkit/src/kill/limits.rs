//! An operator who limits the disk, changes his mind and lifts the limits, all the time.

use super::daemon::ask;
use super::shared::Shared;
use crate::Rng;
use serde_json::json;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Between two changes.
const PAUSE: Duration = Duration::from_millis(20);

/// Until the queues are to stop.
pub(super) fn operate(dir: &Path, shared: &Shared, random: &mut Rng) {
    let limits = [
        json!({}),
        json!({ "iops": 200, "iops-size": "8K" }),
        json!({ "iops-write": 100, "iops-write-max": 200, "bps": "4M" }),
        json!({ "iops-read": 150, "bps-write": "1M" }),
    ];
    while !shared.stop.load(Relaxed) {
        let limits = &limits[random.pick(&[0, 1, 2, 3])];
        // The daemon may be gone, or not there yet.
        let _ = ask(dir, &json!({"command": "limit", "disk": 0, "lift": true, "limits": limits}));
        std::thread::sleep(PAUSE);
        let stats = ask(dir, &json!({"command": "stats", "disk": 0})).unwrap_or_default();
        let waited = stats["disks"][0]["counts"]["throttled"].as_u64().is_some_and(|n| n > 0);
        shared.throttled.fetch_add(u64::from(waited), Relaxed);
    }
}
