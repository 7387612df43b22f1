/** An event for Esper. Columns that are not selected are 0 or null. */
public final class IoEvent {
    public long time, request, sector, size, filterTime;
    public String type, operation, machine, disk, physicalDisk;

    public long getBlktapTS() { return time; }
    public String getType() { return type; }
    public String getIOOp() { return operation; }
    public long getReqId() { return request; }
    public long getSector() { return sector; }
    public long getSize() { return size; }
    public String getVMName() { return machine; }
    public String getVDisk() { return disk; }
    public String getPDisk() { return physicalDisk; }
    public long getFtrTS() { return filterTime; }
}
