//! Names of feature bits.

/// Names of virtio feature bits of a block device (VIRTIO 1.2 §5.2.3 and §6), and vhost-user's own
/// bit 30; `None` for bits that mean nothing known.
#[must_use]
pub const fn virtio_feature_name(bit: u32) -> Option<&'static str> {
    Some(match bit {
        0 => "BARRIER",
        1 => "SIZE_MAX",
        2 => "SEG_MAX",
        4 => "GEOMETRY",
        5 => "RO",
        6 => "BLK_SIZE",
        7 => "SCSI",
        9 => "FLUSH",
        10 => "TOPOLOGY",
        11 => "CONFIG_WCE",
        12 => "MQ",
        13 => "DISCARD",
        14 => "WRITE_ZEROES",
        15 => "LIFETIME",
        16 => "SECURE_ERASE",
        17 => "ZONED",
        24 => "NOTIFY_ON_EMPTY",
        26 => "LOG_ALL",
        27 => "ANY_LAYOUT",
        28 => "INDIRECT_DESC",
        29 => "EVENT_IDX",
        30 => "PROTOCOL_FEATURES",
        32 => "VERSION_1",
        33 => "ACCESS_PLATFORM",
        34 => "RING_PACKED",
        35 => "IN_ORDER",
        36 => "ORDER_PLATFORM",
        37 => "SR_IOV",
        38 => "NOTIFICATION_DATA",
        39 => "NOTIF_CONFIG_DATA",
        40 => "RING_RESET",
        41 => "ADMIN_VQ",
        _ => return None,
    })
}

/// Names of vhost-user protocol feature bits, as the protocol's specification has them.
#[must_use]
pub const fn vhost_user_feature_name(bit: u32) -> Option<&'static str> {
    Some(match bit {
        0 => "MQ",
        1 => "LOG_SHMFD",
        2 => "RARP",
        3 => "REPLY_ACK",
        4 => "NET_MTU",
        5 => "BACKEND_REQ",
        6 => "CROSS_ENDIAN",
        7 => "CRYPTO_SESSION",
        8 => "PAGEFAULT",
        9 => "CONFIG",
        10 => "BACKEND_SEND_FD",
        11 => "HOST_NOTIFIER",
        12 => "INFLIGHT_SHMFD",
        13 => "RESET_DEVICE",
        14 => "INBAND_NOTIFICATIONS",
        15 => "CONFIGURE_MEM_SLOTS",
        16 => "STATUS",
        17 => "XEN_MMAP",
        18 => "SHARED_OBJECT",
        19 => "DEVICE_STATE",
        _ => return None,
    })
}
