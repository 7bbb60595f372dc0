// A driver that launches nothing: it writes down what it is asked, as the real header declares it.
#include <cuda.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static char text[1 << 16];
static size_t used;
static CUcontext stack[8] = {NULL};
static int depth;

const char *fake_log(void) { return text; }
void fake_clear(void) { used = 0, text[0] = 0; }
int fake_param_sizes[16];  // set by the test: the driver knows them from the cubin
const char *fake_failing = "";  // the function that fails
int fake_failure = CUDA_ERROR_INVALID_VALUE;

static CUresult note(const char *function, const char *format, ...) {
    va_list args;
    va_start(args, format);
    used += snprintf(text + used, sizeof text - used, "%s", function);
    used += vsnprintf(text + used, sizeof text - used, format, args);
    used += snprintf(text + used, sizeof text - used, "\n");
    va_end(args);
    return strcmp(function, fake_failing) ? CUDA_SUCCESS : (CUresult)fake_failure;
}

static void hex(char *out, const void *data, int size) {
    for (int k = 0; k < size; k++) sprintf(out + 2 * k, "%02x", ((const unsigned char *)data)[k]);
}

void fake_set_current(CUcontext context) { depth = 0, stack[0] = context; }

CUresult cuInit(unsigned flags) { return note("cuInit", " %u", flags); }

CUresult cuGetErrorName(CUresult error, const char **out) {
    *out = error == CUDA_ERROR_INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : NULL;
    return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char **out) {
    *out = error == CUDA_ERROR_INVALID_VALUE ? "invalid argument" : NULL;
    return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDriverGetVersion(int *version) { return *version = 12080, CUDA_SUCCESS; }

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal + 100;
    return note("cuDeviceGet", " %d", ordinal);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)(size_t)(0xc0000000000 + device);
    return note("cuDevicePrimaryCtxRetain", " %d", device);
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = stack[depth];
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
    stack[++depth] = context;
    return note("cuCtxPushCurrent", " %p", context);
}

CUresult cuCtxPopCurrent(CUcontext *context) {
    *context = stack[depth--];
    return note("cuCtxPopCurrent", "");
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    *module = (CUmodule)0xb00000000000;
    return note("cuModuleLoadData", " %p %s", stack[depth], (const char *)image);
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = (CUfunction)0xf00000000000;
    return note("cuModuleGetFunction", " %p %s", module, name);
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    int shared = attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    return note("cuFuncSetAttribute", " %p %s %d", function, shared ? "shared" : "?", value);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction function, void **params, void **extra) {
    char values[2048] = "";
    for (int k = 0; fake_param_sizes[k]; k++) {
        strcat(values, " ");
        hex(values + strlen(values), params[k], fake_param_sizes[k]);
    }
    char cluster[64] = "";
    for (unsigned k = 0; k < c->numAttrs; k++) {
        const CUlaunchAttribute *a = c->attrs + k;
        if (a->id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
            sprintf(cluster, " cluster %u %u %u", a->value.clusterDim.x, a->value.clusterDim.y, a->value.clusterDim.z);
    }
    return note("cuLaunchKernelEx", " %p ctx %p grid %u %u %u block %u %u %u shared %u stream %p%s extra %p params%s",
                function, stack[depth], c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY,
                c->blockDimZ, c->sharedMemBytes, c->hStream, cluster, extra, values);
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *shape, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
    static const char *types[] = {[CU_TENSOR_MAP_DATA_TYPE_FLOAT16] = "fp16",
                                  [CU_TENSOR_MAP_DATA_TYPE_FLOAT32] = "fp32",
                                  [CU_TENSOR_MAP_DATA_TYPE_BFLOAT16] = "bf16"};
    static const int swizzles[] = {[CU_TENSOR_MAP_SWIZZLE_NONE] = 0, [CU_TENSOR_MAP_SWIZZLE_32B] = 32,
                                   [CU_TENSOR_MAP_SWIZZLE_64B] = 64, [CU_TENSOR_MAP_SWIZZLE_128B] = 128};
    char lists[512] = "";
    for (cuuint32_t k = 0; k < rank; k++) sprintf(lists + strlen(lists), " %llu", (unsigned long long)shape[k]);
    strcat(lists, " strides");
    for (cuuint32_t k = 0; k + 1 < rank; k++) sprintf(lists + strlen(lists), " %llu", (unsigned long long)strides[k]);
    strcat(lists, " box");
    for (cuuint32_t k = 0; k < rank; k++) sprintf(lists + strlen(lists), " %u/%u", box[k], steps[k]);
    int plain = interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE &&
                promotion == CU_TENSOR_MAP_L2_PROMOTION_L2_128B && (size_t)map % 64 == 0;
    memset(map, 0x5a, sizeof *map);
    memcpy(map, "map", 3);
    return note("cuTensorMapEncodeTiled", " %s %p shape%s swizzle %d %s", types[type], address, lists,
                swizzles[swizzle], plain ? "plain" : "odd");
}
